#include <algorithm>
#include <cmath>

#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"

namespace fovea::cpu {

void rms_norm(const Kernels& kernels, const OpContext& ctx, const RmsNormParams& params) {
  const std::int64_t width = params.x.shape[1];
  const auto dtype = static_cast<std::size_t>(params.x.dtype);
  const Row weight = row_of(params.weight, {});
  for_row_ranges(*ctx.pool, params.x.shape[0], width, [&](std::int64_t begin, std::int64_t end) {
    alignas(64) float weights[kRowChunk];
    for (std::int64_t t = begin; t < end; ++t) {
      const Row x = row_of(params.x, {t});
      const Row out = row_of(params.out, {t});
      const float mean = kernels.sum_squares[dtype](x.data, width) / static_cast<float>(width);
      const float scale = 1.f / std::sqrt(mean + params.eps);
      for (std::int64_t i = 0; i < width; i += kRowChunk) {
        const std::int64_t count = std::min(kRowChunk, width - i);
        load_row(kernels, weight.from(i), count, weights);
        kernels.scale_by_weight[dtype](x.from(i).data, scale, weights, count, out.from(i).data);
      }
    }
  });
}

}  // namespace fovea::cpu
