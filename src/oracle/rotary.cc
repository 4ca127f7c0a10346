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
  double low = pair_of(yarn.beta_fast), high = pair_of(yarn.beta_slow);
  if (yarn.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, d - 1);
  if (low == high) high += 0.001;
  for (std::size_t i = 0; i < result.inv_freq.size(); ++i) {
    const double slowed = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    result.inv_freq[i] *= (1 - slowed) + slowed / yarn.factor;
  }
  result.amplitude = yarn.attention_factor > 0 ? yarn.attention_factor
                                               : yarn_mscale(yarn.factor, yarn.mscale) /
                                                     yarn_mscale(yarn.factor, yarn.mscale_all_dim);
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

Rotary rotary_linear(std::int64_t dim, double theta, bool interleaved, double factor) {
  Rotary result = rotary(dim, theta, interleaved);
  for (double& frequency : result.inv_freq) frequency /= factor;
  return result;
}

Rotary rotary_dynamic_ntk(std::int64_t dim, double theta, bool interleaved, double factor,
                          double length, double original_max_position) {
  require(dim > 2, "dim " + std::to_string(dim) + " must be above 2: its exponent is d / (d - 2)");
  const double stretch = std::max(length, original_max_position) / original_max_position;
  const auto d = static_cast<double>(dim);
  // The last pair, of frequency theta^(-(d - 2) / d), becomes slower by the whole base.
  const double base = factor * stretch - (factor - 1);
  return rotary(dim, theta * std::pow(base, d / (d - 2)), interleaved);
}

Rotary rotary_llama3(std::int64_t dim, double theta, bool interleaved, const Llama3& llama3) {
  Rotary result = rotary(dim, theta, interleaved);
  for (double& frequency : result.inv_freq) {
    const double turns = llama3.original_max_position * frequency / (2 * std::numbers::pi);
    // 1 where a pair turns often enough within the original length to be kept.
    const double kept = std::clamp(
        (turns - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor), 0.0,
        1.0);
    frequency *= kept + (1 - kept) / llama3.factor;
  }
  return result;
}

void rotate_pairs(std::span<double> x, std::span<const std::int64_t> positions, std::int64_t heads,
                  const Rotary& rotary, std::int64_t head_dim) {
  const std::size_t pairs = rotary.inv_freq.size();
  if (pairs == 0) return;
  const std::size_t width = head_dim > 0 ? static_cast<std::size_t>(head_dim) : 2 * pairs;
  require(width >= 2 * pairs, "head_dim " + std::to_string(head_dim) + " is less than the " +
                                  std::to_string(2 * pairs) + " channels that turn");
  require(positions.size() % pairs == 0, "positions hold " + std::to_string(positions.size()) +
                                             " values, need rows of " + std::to_string(pairs));
  const std::size_t rows = positions.size() / pairs;
  require_size("x", x, static_cast<std::int64_t>(rows * width) * heads);
  for (std::size_t i = 0; i < pairs; ++i) {
    const std::size_t first = rotary.interleaved ? 2 * i : i;
    const std::size_t second = rotary.interleaved ? 2 * i + 1 : i + pairs;
    for (std::size_t row = 0; row < rows; ++row) {
      const double angle = static_cast<double>(positions[row * pairs + i]) * rotary.inv_freq[i];
      const double cosine = rotary.amplitude * std::cos(angle);
      const double sine = rotary.amplitude * std::sin(angle);
      for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) {
        double* head = x.data() + (row * static_cast<std::size_t>(heads) + h) * width;
        const double a = head[first], b = head[second];
        head[first] = a * cosine - b * sine;
        head[second] = b * cosine + a * sine;
      }
    }
  }
}

void rotate(std::span<double> x, std::span<const std::int64_t> positions, std::int64_t heads,
            const Rotary& rotary, std::int64_t head_dim) {
  std::vector<std::int64_t> of_pairs;
  of_pairs.reserve(positions.size() * rotary.inv_freq.size());
  for (const std::int64_t position : positions) {
    of_pairs.insert(of_pairs.end(), rotary.inv_freq.size(), position);
  }
  rotate_pairs(x, of_pairs, heads, rotary, head_dim);
}

}  // namespace fovea::oracle
