#include <algorithm>
#include <cmath>
#include <numbers>

#include "fovea/oracle.h"
#include "oracle/numerics.h"

namespace fovea::oracle {

Rotary rotary(std::int64_t dim, double theta, bool interleaved) {
  require(dim > 0 && dim % 2 == 0, "dim " + std::to_string(dim) + " is not positive and even");
  Rotary result;
  result.interleaved = interleaved;
  for (std::int64_t i = 0; i < dim / 2; ++i) {
    result.inv_freq.push_back(
        std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim)));
  }
  return result;
}

double yarn_mscale(double factor, double m) {
  return factor > 1 ? 0.1 * m * std::log(factor) + 1 : 1;
}

Rotary rotary_yarn(std::int64_t dim, double theta, bool interleaved, const Yarn& yarn) {
  Rotary result = rotary(dim, theta, interleaved);
  const auto d = static_cast<double>(dim);
  // The (fractional) channel pair that turns `turns` times within the original length.
  const auto pair_of = [&](double turns) {
    return d * std::log(yarn.original_max_position / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  // Pairs below `low` turn often enough to be kept; pairs above `high` are slowed by the factor.
  const double low = std::max(std::floor(pair_of(yarn.beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_of(yarn.beta_slow)), d - 1);
  if (low == high) high += 0.001;
  for (std::size_t i = 0; i < result.inv_freq.size(); ++i) {
    const double slowed = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    result.inv_freq[i] *= (1 - slowed) + slowed / yarn.factor;
  }
  result.amplitude =
      yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim);
  return result;
}

Rotary rotary_long(std::int64_t dim, double theta, bool interleaved,
                   std::span<const double> divisors, double max_position,
                   double original_max_position) {
  Rotary result = rotary(dim, theta, interleaved);
  require_size("divisors", divisors, dim / 2);
  for (std::size_t i = 0; i < result.inv_freq.size(); ++i) result.inv_freq[i] /= divisors[i];
  if (max_position > original_max_position) {
    result.amplitude = std::sqrt(1 + std::log(max_position / original_max_position) /
                                         std::log(original_max_position));
  }
  return result;
}

void rotate(std::span<double> x, std::span<const std::int64_t> positions, std::int64_t heads,
            const Rotary& rotary) {
  const auto half = static_cast<std::int64_t>(rotary.inv_freq.size());
  require_size("x", x, static_cast<std::int64_t>(positions.size()) * heads * 2 * half);
  double* row = x.data();
  for (const std::int64_t position : positions) {
    for (std::int64_t h = 0; h < heads; ++h, row += 2 * half) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle =
            static_cast<double>(position) * rotary.inv_freq[static_cast<std::size_t>(i)];
        const double cosine = rotary.amplitude * std::cos(angle);
        const double sine = rotary.amplitude * std::sin(angle);
        double& a = rotary.interleaved ? row[2 * i] : row[i];
        double& b = rotary.interleaved ? row[2 * i + 1] : row[i + half];
        const double turned_a = a * cosine - b * sine;
        b = b * cosine + a * sine;
        a = turned_a;
      }
    }
  }
}

}  // namespace fovea::oracle
