#include <algorithm>
#include <cmath>

#include "fovea/oracle.h"
#include "oracle/numerics.h"

namespace fovea::oracle {

std::vector<double> rms_norm(std::span<const double> x, std::span<const double> weight,
                             double eps) {
  const auto dim = static_cast<std::int64_t>(weight.size());
  require(dim > 0 && x.size() % weight.size() == 0,
          "x holds " + std::to_string(x.size()) + " values, needs rows of " + std::to_string(dim));
  std::vector<double> out(x.begin(), x.end());
  for (auto row = out.begin(); row != out.end(); row += dim) {
    const double mean_square = dot(&*row, &*row, dim) / static_cast<double>(dim);
    const double root = std::sqrt(mean_square + eps);
    for (std::int64_t i = 0; i < dim; ++i)
      row[i] = row[i] / root * weight[static_cast<std::size_t>(i)];
  }
  return out;
}

std::vector<double> linear(std::span<const double> x, std::span<const double> weight,
                           std::span<const double> bias, std::int64_t in_features) {
  require(in_features > 0 && static_cast<std::int64_t>(x.size()) % in_features == 0,
          "x holds " + std::to_string(x.size()) +
              " values, needs rows of in_features = " + std::to_string(in_features));
  require(static_cast<std::int64_t>(weight.size()) % in_features == 0,
          "weight holds " + std::to_string(weight.size()) +
              " values, needs rows of in_features = " + std::to_string(in_features));
  const std::int64_t rows = static_cast<std::int64_t>(x.size()) / in_features;
  const std::int64_t out_features = static_cast<std::int64_t>(weight.size()) / in_features;
  if (!bias.empty()) require_size("bias", bias, out_features);
  std::vector<double> y(static_cast<std::size_t>(rows * out_features));
  // A weight row is read once for this many rows of x, which stay in the second cache level.
  constexpr std::int64_t kRowBlock = 16;
  for (std::int64_t first = 0; first < rows; first += kRowBlock) {
    const std::int64_t last = std::min(first + kRowBlock, rows);
    for (std::int64_t o = 0; o < out_features; ++o) {
      const double* w = weight.data() + o * in_features;
      const double b = bias.empty() ? 0.0 : bias[static_cast<std::size_t>(o)];
      for (std::int64_t r = first; r < last; ++r) {
        y[static_cast<std::size_t>(r * out_features + o)] =
            b + dot(x.data() + r * in_features, w, in_features);
      }
    }
  }
  return y;
}

}  // namespace fovea::oracle
