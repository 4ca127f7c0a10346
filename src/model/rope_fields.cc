#include "model/rope_fields.h"

#include <string>

#include "core/check.h"
#include "model/json_events.h"

namespace fovea {

namespace {

/// Text of the scaling's type, under either of its two names.
std::string rope_type(const ConfigFields& rope) {
  const bool has_new = rope.has("rope_type");
  const bool has_old = rope.has("type");
  if (!has_new && !has_old) return "default";
  const std::string type = rope.text(has_new ? "rope_type" : "type");
  FOVEA_CHECK(!has_new || !has_old || rope.text("type") == type, corrupt_file,
              "{}: fields {} and {} differ: {} and {}", rope.file(), rope.name_of("rope_type"),
              rope.name_of("type"), printable(type), printable(rope.text("type")));
  return type;
}

std::int64_t original_max_position(const ConfigFields& config, const ConfigFields& rope) {
  constexpr const char* kKey = "original_max_position_embeddings";
  return (config.has(kKey) ? config : rope).integer(kKey, 2, kMaxDim);
}

LinearScaling parse_linear(const ConfigFields& rope) {
  rope.refuse_others({"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"});
  return {.factor = rope.number("factor", 1)};
}

DynamicNtkScaling parse_dynamic(const ConfigFields& rope, const RopeConfig& base) {
  rope.refuse_others({"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"});
  return {.factor = rope.number("factor", 1), .original_max_position = base.max_position};
}

YarnScaling parse_yarn(const ConfigFields& config, const ConfigFields& rope) {
  rope.refuse_others({"rope_type", "type", "rope_theta", "factor", "beta_fast", "beta_slow",
                      "mscale", "mscale_all_dim", "original_max_position_embeddings", "truncate",
                      "attention_factor", "partial_rotary_factor"});
  YarnScaling yarn;
  yarn.factor = rope.number("factor", 1);
  yarn.original_max_position = original_max_position(config, rope);
  constexpr double kLeastRotations = 1e-3;
  yarn.beta_fast = rope.number_or("beta_fast", 32, kLeastRotations);
  yarn.beta_slow = rope.number_or("beta_slow", 1, kLeastRotations);
  yarn.truncate = rope.boolean_or("truncate", true);
  yarn.mscale = rope.number_or("mscale", 1, 0);
  yarn.mscale_all_dim = rope.number_or("mscale_all_dim", 0, 0);
  if (rope.has("attention_factor")) yarn.attention_factor = rope.number("attention_factor", 0);
  // With one of them alone, DeepSeek's own code and transformers give different amplitudes.
  const bool both = yarn.mscale != 0 && yarn.mscale_all_dim != 0;
  const bool plain = yarn.mscale == 1 && yarn.mscale_all_dim == 0;
  FOVEA_CHECK((both && rope.has("mscale")) || plain, unsupported,
              "{}: fields {} ({}) and {} ({}) must both be there and not zero, or both absent",
              rope.file(), rope.name_of("mscale"), yarn.mscale, rope.name_of("mscale_all_dim"),
              yarn.mscale_all_dim);
  return yarn;
}

Llama3Scaling parse_llama3(const ConfigFields& config, const ConfigFields& rope) {
  rope.refuse_others({"rope_type", "type", "rope_theta", "factor", "low_freq_factor",
                      "high_freq_factor", "original_max_position_embeddings",
                      "partial_rotary_factor"});
  constexpr double kLeastFactor = 1e-3;
  Llama3Scaling llama3;
  llama3.factor = rope.number("factor", 1);
  llama3.low_freq_factor = rope.number("low_freq_factor", kLeastFactor);
  llama3.high_freq_factor = rope.number("high_freq_factor", kLeastFactor);
  FOVEA_CHECK(llama3.high_freq_factor > llama3.low_freq_factor, corrupt_file,
              "{}: field {} is {}, but must be above {}, {}", rope.file(),
              rope.name_of("high_freq_factor"), llama3.high_freq_factor,
              rope.name_of("low_freq_factor"), llama3.low_freq_factor);
  llama3.original_max_position = original_max_position(config, rope);
  return llama3;
}

LongRopeScaling parse_longrope(const ConfigFields& config, const ConfigFields& rope,
                               const RopeConfig& base) {
  rope.refuse_others({"rope_type", "type", "rope_theta", "factor", "short_factor", "long_factor",
                      "original_max_position_embeddings", "partial_rotary_factor"});
  constexpr double kLeastFactor = 1e-6;
  LongRopeScaling longrope;
  const auto pairs = static_cast<std::size_t>(base.dim / 2);
  longrope.short_factor = rope.numbers("short_factor", pairs, kLeastFactor);
  longrope.long_factor = rope.numbers("long_factor", pairs, kLeastFactor);
  longrope.original_max_position = original_max_position(config, rope);
  longrope.max_position = base.max_position;
  const double ratio =
      static_cast<double>(base.max_position) / static_cast<double>(longrope.original_max_position);
  FOVEA_CHECK(rope.number_or("factor", ratio, 0) == ratio, unsupported,
              "{}: field {} must be max_position_embeddings / original_max_position_embeddings, {}",
              rope.file(), rope.name_of("factor"), ratio);
  return longrope;
}

void check_theta(const ConfigFields& config, const RopeConfig& rope) {
  FOVEA_CHECK(rope.theta > 1, corrupt_file, "{}: field rope_theta is {}, but must be above 1",
              config.file(), rope.theta);
}

}  // namespace

void refuse_partial_rotation(const ConfigFields& fields) {
  FOVEA_CHECK(fields.number_or("partial_rotary_factor", 1, 0) == 1, unsupported,
              "{}: field {} must be 1: whole heads, or qk_rope_head_dim channels, are rotated",
              fields.file(), fields.name_of("partial_rotary_factor"));
}

RopeConfig parse_rope(const ConfigFields& config, const RopeConfig& base) {
  FOVEA_CHECK(!config.has("rope_parameters") || !config.has("rope_scaling"), corrupt_file,
              "{}: fields rope_parameters and rope_scaling exclude each other", config.file());
  RopeConfig rope = base;
  rope.theta = config.number_or("rope_theta", base.theta, 1);
  check_theta(config, rope);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (config.has(key)) rope = parse_rope_object(config, config.child(key), rope);
  }
  return rope;
}

RopeConfig parse_rope_object(const ConfigFields& config, const ConfigFields& fields,
                             const RopeConfig& base) {
  RopeConfig rope = base;
  rope.theta = fields.number_or("rope_theta", base.theta, 1);
  check_theta(config, rope);
  refuse_partial_rotation(fields);
  const std::string type = rope_type(fields);
  if (type == "linear") {
    rope.scaling = parse_linear(fields);
  } else if (type == "dynamic") {
    rope.scaling = parse_dynamic(fields, base);
  } else if (type == "yarn") {
    rope.scaling = parse_yarn(config, fields);
  } else if (type == "llama3") {
    rope.scaling = parse_llama3(config, fields);
  } else if (type == "longrope") {
    rope.scaling = parse_longrope(config, fields, base);
  } else {
    FOVEA_CHECK(
        type == "default", unsupported,
        "{}: field {} is {}, but must be default, linear, dynamic, yarn, llama3 or longrope",
        fields.file(), fields.name_of("rope_type"), printable(type));
    // Left over from a scaling that is switched off, these change nothing.
    fields.refuse_others({"rope_type", "type", "rope_theta", "partial_rotary_factor",
                          "original_max_position_embeddings"});
  }
  return rope;
}

}  // namespace fovea
