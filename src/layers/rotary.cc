#include "fovea/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.h"

namespace fovea {
namespace {

void check(const YarnScaling& yarn) {
  FOVEA_CHECK(yarn.factor > 0 && std::isfinite(yarn.factor), invalid_argument,
              "rope: YaRN factor is {}, but must be positive", yarn.factor);
  FOVEA_CHECK(yarn.original_max_position > 0, invalid_argument,
              "rope: YaRN original_max_position is {}, but must be positive",
              yarn.original_max_position);
  FOVEA_CHECK(yarn.beta_fast > 0 && yarn.beta_slow > 0, invalid_argument,
              "rope: YaRN beta_fast is {} and beta_slow is {}, but both must be positive",
              yarn.beta_fast, yarn.beta_slow);
}

void check(const LongRopeScaling& longrope, std::int64_t pairs) {
  const struct {
    const char* name;
    const std::vector<double>& divisors;
  } fields[] = {{"short_factor", longrope.short_factor}, {"long_factor", longrope.long_factor}};
  for (const auto& [name, divisors] : fields) {
    FOVEA_CHECK(static_cast<std::int64_t>(divisors.size()) == pairs, invalid_argument,
                "rope: LongRoPE {} has {} entries, but must have {}, half of dim", name,
                divisors.size(), pairs);
    for (double divisor : divisors) {
      FOVEA_CHECK(divisor > 0 && std::isfinite(divisor), invalid_argument,
                  "rope: LongRoPE {} holds {}, but must be positive", name, divisor);
    }
  }
  FOVEA_CHECK(longrope.original_max_position > 1, invalid_argument,
              "rope: LongRoPE original_max_position is {}, but must be above 1",
              longrope.original_max_position);
}

void check(const RopeConfig& config) {
  FOVEA_CHECK(config.dim > 0 && config.dim % 2 == 0, invalid_argument,
              "rope: dim is {}, but must be positive and even", config.dim);
  FOVEA_CHECK(config.theta > 1 && std::isfinite(config.theta), invalid_argument,
              "rope: theta is {}, but must be above 1", config.theta);
  FOVEA_CHECK(config.max_position > 0, invalid_argument,
              "rope: max_position is {}, but must be positive", config.max_position);
  if (const auto* yarn = std::get_if<YarnScaling>(&config.scaling)) check(*yarn);
  if (const auto* longrope = std::get_if<LongRopeScaling>(&config.scaling)) {
    check(*longrope, config.dim / 2);
  }
}

/// Slows the channel pairs that turn less than beta_slow times within the original length by the
/// factor, keeps those that turn more than beta_fast times, and blends in between.
void scale_yarn(const YarnScaling& yarn, double theta, std::vector<double>& inv_freq) {
  const auto dim = 2.0 * static_cast<double>(inv_freq.size());
  const auto original = static_cast<double>(yarn.original_max_position);
  const auto pair_with_turns = [&](double turns) {
    return dim * std::log(original / (2 * std::numbers::pi * turns)) / (2 * std::log(theta));
  };
  const double low = std::max(0.0, std::floor(pair_with_turns(yarn.beta_fast)));
  const double high = std::min(dim - 1, std::ceil(pair_with_turns(yarn.beta_slow)));
  const double width = high == low ? 0.001 : high - low;  // A step, where both bounds coincide.
  for (std::size_t i = 0; i < inv_freq.size(); ++i) {
    const double slow = std::clamp((static_cast<double>(i) - low) / width, 0.0, 1.0);
    inv_freq[i] = inv_freq[i] * (1 - slow) + inv_freq[i] / yarn.factor * slow;
  }
}

}  // namespace

double yarn_mscale(double factor, double m) {
  return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0;
}

std::vector<double> RotaryEmbedding::inv_freq() const {
  const auto pairs = static_cast<std::size_t>(config_.dim / 2);
  std::vector<double> inv_freq(pairs);
  for (std::size_t i = 0; i < pairs; ++i) {
    inv_freq[i] = std::pow(config_.theta, -static_cast<double>(i) / static_cast<double>(pairs));
  }
  if (const auto* yarn = std::get_if<YarnScaling>(&config_.scaling)) {
    scale_yarn(*yarn, config_.theta, inv_freq);
  }
  if (const auto* longrope = std::get_if<LongRopeScaling>(&config_.scaling)) {
    const std::vector<double>& divisors = config_.max_position <= longrope->original_max_position
                                              ? longrope->short_factor
                                              : longrope->long_factor;
    for (std::size_t i = 0; i < pairs; ++i) inv_freq[i] /= divisors[i];
  }
  return inv_freq;
}

double RotaryEmbedding::amplitude() const {
  if (const auto* yarn = std::get_if<YarnScaling>(&config_.scaling)) {
    return yarn_mscale(yarn->factor, yarn->mscale) /
           yarn_mscale(yarn->factor, yarn->mscale_all_dim);
  }
  if (const auto* longrope = std::get_if<LongRopeScaling>(&config_.scaling)) {
    const auto original = static_cast<double>(longrope->original_max_position);
    const auto trained = static_cast<double>(longrope->max_position > 0 ? longrope->max_position
                                                                        : config_.max_position);
    return trained <= original ? 1.0
                               : std::sqrt(1 + std::log(trained / original) / std::log(original));
  }
  return 1.0;
}

RotaryEmbedding::RotaryEmbedding(const RopeConfig& config) : config_(config) {
  check(config_);
  const std::vector<double> frequencies = inv_freq();
  const double factor = amplitude();
  const std::int64_t pairs = config_.dim / 2;
  cos_sin_ = Tensor::empty(DType::f32, {config_.max_position, config_.dim});
  for (std::int64_t position = 0; position < config_.max_position; ++position) {
    float* cosines = cos_sin_.ptr<float>({position});
    float* sines = cosines + pairs;
    for (std::int64_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<std::size_t>(i)];
      cosines[i] = static_cast<float>(factor * std::cos(angle));
      sines[i] = static_cast<float>(factor * std::sin(angle));
    }
  }
}

void RotaryEmbedding::operator()(const OpContext& ctx, const TensorView& x,
                                 const TensorView& positions) const {
  rope(ctx, {.x = x, .positions = positions, .cos_sin = cos_sin(), .pairing = config_.pairing});
}

}  // namespace fovea
