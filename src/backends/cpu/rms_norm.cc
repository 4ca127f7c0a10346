#include <algorithm>
#include <cmath>

#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rms_norm.h"
#include "backends/cpu/rows.h"

namespace fovea::cpu {
namespace {

/// Squares below this may have lost bits to float32's subnormals (its smallest normal is 1.2e-38).
constexpr float kSmallestExactSum = 1e-30f;

double sum_squares_in_double(const Kernels& kernels, const Row& x, std::int64_t width) {
  alignas(64) float values[kRowChunk];
  double sum = 0;
  for (std::int64_t i = 0; i < width; i += kRowChunk) {
    const std::int64_t count = std::min(kRowChunk, width - i);
    load_row(kernels, x.from(i), count, values);
    for (std::int64_t j = 0; j < count; ++j) sum += static_cast<double>(values[j]) * values[j];
  }
  return sum;
}

/// 1 / sqrt(mean(x^2) + eps). The squares of large or tiny values leave float32's range; such rows
/// are summed again in double.
float row_scale(const Kernels& kernels, const Row& x, DType dtype, std::int64_t width, float eps) {
  const float sum = kernels.sum_squares[static_cast<std::size_t>(dtype)](x.data, width);
  const double exact = std::isfinite(sum) && sum >= kSmallestExactSum
                           ? static_cast<double>(sum)
                           : sum_squares_in_double(kernels, x, width);
  return static_cast<float>(1. / std::sqrt(exact / static_cast<double>(width) + eps));
}

}  // namespace

void norm_row(const Kernels& kernels, const Row& x, std::int64_t width, const TensorView& weight,
              float eps, const Row& out) {
  const Row weight_row = row_of(weight, {});
  const float scale = row_scale(kernels, x, x.dtype, width, eps);
  alignas(64) float weights[kRowChunk];
  for (std::int64_t i = 0; i < width; i += kRowChunk) {
    const std::int64_t count = std::min(kRowChunk, width - i);
    load_row(kernels, weight_row.from(i), count, weights);
    kernels.scale_by_weight[static_cast<std::size_t>(x.dtype)](x.from(i).data, scale, weights,
                                                               count, out.from(i).data);
  }
}

void rms_norm(const Kernels& kernels, const OpContext& ctx, const RmsNormParams& params) {
  const std::int64_t width = params.x.shape[1];
  for_row_ranges(*ctx.pool, params.x.shape[0], width, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      norm_row(kernels, row_of(params.x, {t}), width, params.weight, params.eps,
               row_of(params.out, {t}));
    }
  });
}

}  // namespace fovea::cpu
