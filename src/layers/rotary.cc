#include "fovea/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.h"

namespace fovea {
namespace {

/// "rope: YaRN factor is 0, but must be positive".
void check_positive(const char* scaling, const char* field, double value) {
  FOVEA_CHECK(value > 0 && std::isfinite(value), invalid_argument,
              "rope: {} {} is {}, but must be positive", scaling, field, value);
}

void check_positive(const char* scaling, const char* field, std::int64_t value) {
  FOVEA_CHECK(value > 0, invalid_argument, "rope: {} {} is {}, but must be positive", scaling,
              field, value);
}

void check(const std::monostate&, const RopeConfig&) {}

void check(const LinearScaling& linear, const RopeConfig&) {
  check_positive("linear", "factor", linear.factor);
}

void check(const DynamicNtkScaling& ntk, const RopeConfig& config) {
  constexpr const char* kScaling = "dynamic NTK";
  check_positive(kScaling, "original_max_position", ntk.original_max_position);
  FOVEA_CHECK(ntk.factor >= 1 && std::isfinite(ntk.factor), invalid_argument,
              "rope: {} factor is {}, but must be at least 1", kScaling, ntk.factor);
  FOVEA_CHECK(config.dim > 2, invalid_argument,
              "rope: dim is {}, but must be above 2 for {}, whose exponent is dim / (dim - 2)",
              config.dim, kScaling);
}

void check(const YarnScaling& yarn, const RopeConfig&) {
  check_positive("YaRN", "factor", yarn.factor);
  check_positive("YaRN", "original_max_position", yarn.original_max_position);
  FOVEA_CHECK(yarn.beta_fast > 0 && yarn.beta_slow > 0, invalid_argument,
              "rope: YaRN beta_fast is {} and beta_slow is {}, but both must be positive",
              yarn.beta_fast, yarn.beta_slow);
  if (yarn.attention_factor) check_positive("YaRN", "attention_factor", *yarn.attention_factor);
}

void check(const Llama3Scaling& llama3, const RopeConfig&) {
  check_positive("llama3", "factor", llama3.factor);
  check_positive("llama3", "original_max_position", llama3.original_max_position);
  FOVEA_CHECK(
      llama3.low_freq_factor > 0 && llama3.high_freq_factor > llama3.low_freq_factor &&
          std::isfinite(llama3.high_freq_factor),
      invalid_argument,
      "rope: llama3 low_freq_factor is {} and high_freq_factor is {}, but the first must be "
      "positive and the second above it",
      llama3.low_freq_factor, llama3.high_freq_factor);
}

void check(const LongRopeScaling& longrope, const RopeConfig& config) {
  const std::int64_t pairs = config.dim / 2;
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
  const auto& [time, height, width] = config.sections.pairs;
  FOVEA_CHECK(time >= 0 && height >= 0 && width >= 0 &&
                  (!config.sections.multi_axis() || time + height + width == config.dim / 2),
              invalid_argument,
              "rope: sections are {}, {} and {} channel pairs, but must add up to {}, half of dim",
              time, height, width, config.dim / 2);
  std::visit([&](const auto& scaling) { check(scaling, config); }, config.scaling);
}

/// theta, or what dynamic NTK makes of it for the table's length.
double effective_theta(const RopeConfig& config) {
  const auto* ntk = std::get_if<DynamicNtkScaling>(&config.scaling);
  if (ntk == nullptr || config.max_position <= ntk->original_max_position) return config.theta;
  const auto dim = static_cast<double>(config.dim);
  const double growth = ntk->factor * static_cast<double>(config.max_position) /
                            static_cast<double>(ntk->original_max_position) -
                        (ntk->factor - 1);
  return config.theta * std::pow(growth, dim / (dim - 2));
}

/// Slows the channel pairs that turn less than beta_slow times within the original length by the
/// factor, keeps those that turn more than beta_fast times, and blends in between.
void scale_yarn(const YarnScaling& yarn, double theta, std::vector<double>& inv_freq) {
  const auto dim = 2.0 * static_cast<double>(inv_freq.size());
  const auto original = static_cast<double>(yarn.original_max_position);
  const auto pair_with_turns = [&](double turns) {
    return dim * std::log(original / (2 * std::numbers::pi * turns)) / (2 * std::log(theta));
  };
  const double first = pair_with_turns(yarn.beta_fast), last = pair_with_turns(yarn.beta_slow);
  const double low = std::max(0.0, yarn.truncate ? std::floor(first) : first);
  const double high = std::min(dim - 1, yarn.truncate ? std::ceil(last) : last);
  const double width = high == low ? 0.001 : high - low;  // A step, where both bounds coincide.
  for (std::size_t i = 0; i < inv_freq.size(); ++i) {
    const double slow = std::clamp((static_cast<double>(i) - low) / width, 0.0, 1.0);
    inv_freq[i] = inv_freq[i] * (1 - slow) + inv_freq[i] / yarn.factor * slow;
  }
}

void scale_llama3(const Llama3Scaling& llama3, std::vector<double>& inv_freq) {
  const auto original = static_cast<double>(llama3.original_max_position);
  for (double& frequency : inv_freq) {
    const double turns = original * frequency / (2 * std::numbers::pi);
    const double kept = std::clamp(
        (turns - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor), 0.0,
        1.0);
    frequency = frequency / llama3.factor * (1 - kept) + frequency * kept;
  }
}

}  // namespace

double yarn_mscale(double factor, double m) {
  return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0;
}

std::vector<double> RotaryEmbedding::inv_freq() const {
  const auto pairs = static_cast<std::size_t>(config_.dim / 2);
  const double theta = effective_theta(config_);
  std::vector<double> inv_freq(pairs);
  for (std::size_t i = 0; i < pairs; ++i) {
    inv_freq[i] = std::pow(theta, -static_cast<double>(i) / static_cast<double>(pairs));
  }
  if (const auto* linear = std::get_if<LinearScaling>(&config_.scaling)) {
    for (double& frequency : inv_freq) frequency /= linear->factor;
  } else if (const auto* yarn = std::get_if<YarnScaling>(&config_.scaling)) {
    scale_yarn(*yarn, theta, inv_freq);
  } else if (const auto* llama3 = std::get_if<Llama3Scaling>(&config_.scaling)) {
    scale_llama3(*llama3, inv_freq);
  } else if (const auto* longrope = std::get_if<LongRopeScaling>(&config_.scaling)) {
    const std::vector<double>& divisors = config_.max_position <= longrope->original_max_position
                                              ? longrope->short_factor
                                              : longrope->long_factor;
    for (std::size_t i = 0; i < pairs; ++i) inv_freq[i] /= divisors[i];
  }
  return inv_freq;
}

double RotaryEmbedding::amplitude() const {
  if (const auto* yarn = std::get_if<YarnScaling>(&config_.scaling)) {
    if (yarn->attention_factor) return *yarn->attention_factor;
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

RotaryEmbedding::RotaryEmbedding(const RopeConfig& config, const MemorySource& memory)
    : config_(config) {
  check(config_);
  const std::vector<double> frequencies = inv_freq();
  const double factor = amplitude();
  const std::int64_t pairs = config_.dim / 2;
  Tensor table = Tensor::empty(DType::f32, {config_.max_position, config_.dim});
  for (std::int64_t position = 0; position < config_.max_position; ++position) {
    float* cosines = table.ptr<float>({position});
    float* sines = cosines + pairs;
    for (std::int64_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<std::size_t>(i)];
      cosines[i] = static_cast<float>(factor * std::cos(angle));
      sines[i] = static_cast<float>(factor * std::sin(angle));
    }
  }
  cos_sin_ = memory.device == Device{} ? std::move(table) : Tensor::copy_of(table, memory);
}

RopeAngles RotaryEmbedding::angles(const TensorView& positions) const {
  return {.positions = positions,
          .cos_sin = cos_sin(),
          .pairing = config_.pairing,
          .sections = config_.sections};
}

void RotaryEmbedding::operator()(const OpContext& ctx, const TensorView& x,
                                 const TensorView& positions) const {
  rope(ctx, {.x = x, .angles = angles(positions)});
}

}  // namespace fovea
