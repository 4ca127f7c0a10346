#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"
#include "ops/index_view.h"

namespace fovea::cpu {
namespace {

/// Channels of one head that do not lie next to each other.
void rotate_strided(const Row& x, const float* cos, const float* sin, std::int64_t half,
                    bool interleaved) {
  for (std::int64_t i = 0; i < half; ++i) {
    const std::int64_t first = interleaved ? 2 * i : i;
    const std::int64_t second = interleaved ? 2 * i + 1 : i + half;
    const float a = load_element(x, first);
    const float b = load_element(x, second);
    store_element(x, first, a * cos[i] - b * sin[i]);
    store_element(x, second, b * cos[i] + a * sin[i]);
  }
}

}  // namespace

void rope(const Kernels& kernels, const OpContext& ctx, const RopeParams& params) {
  const std::int64_t heads = params.x.shape[1];
  const std::int64_t width = params.x.shape[2];
  const std::int64_t half = width / 2;
  const bool interleaved = params.pairing == RopePairing::interleaved;
  const auto rotate = kernels.rotate[static_cast<std::size_t>(params.x.dtype)];
  const auto rotate_tokens = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const float* cos = params.cos_sin.ptr<float>({index_at(params.positions, t), 0});
      const float* sin = cos + half;
      for (std::int64_t n = 0; n < heads; ++n) {
        const Row x = row_of(params.x, {t, n});
        if (x.stride == 1) {
          rotate(x.data, cos, sin, half, interleaved);
        } else {
          rotate_strided(x, cos, sin, half, interleaved);
        }
      }
    }
  };
  for_row_ranges(*ctx.pool, params.x.shape[0], heads * width, rotate_tokens);
}

}  // namespace fovea::cpu
