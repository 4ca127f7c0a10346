#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rotation.h"

namespace fovea::cpu {

void rope(const Kernels& kernels, const OpContext& ctx, const RopeParams& params) {
  const std::int64_t heads = params.x.shape[1];
  const std::int64_t width = params.x.shape[2];
  const auto rotate_tokens = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const TokenAngles angles(params.angles, t);
      for (std::int64_t n = 0; n < heads; ++n) angles.rotate(kernels, row_of(params.x, {t, n}));
    }
  };
  for_row_ranges(*ctx.pool, params.x.shape[0], heads * width, rotate_tokens);
}

}  // namespace fovea::cpu
