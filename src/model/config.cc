// config.json, as far as attention needs it.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "fovea/model.h"
#include "model/json_events.h"

namespace fovea {

namespace {

using nlohmann::json;

constexpr std::size_t kMaxConfigBytes = 16 << 20;  // A thousand times the largest known.
constexpr int kMaxDepth = 32;
/// Products of any two dimensions, and of both with an element's bytes, stay far within 64 bits.
constexpr std::int64_t kMaxDim = 1 << 24;
/// No factor of these files comes near; squares still fit a float.
constexpr double kMaxNumber = 1e12;

/// What the formulas of each model type differ in.
struct Architecture {
  std::string_view model_type;
  RopePairing pairing;
  /// rope_interleave may choose the pairing; elsewhere it may only repeat what the formula has.
  bool pairing_is_configurable;
};
constexpr Architecture kArchitectures[] = {
    {"deepseek_v2", RopePairing::interleaved, false},
    {"deepseek_v3", RopePairing::interleaved, true},
    {"kimi_k2", RopePairing::interleaved, true},
    {"minicpm3", RopePairing::neox, false},
    {"glm4_moe_lite", RopePairing::interleaved, true},
};

/// One JSON object with its place in the file, for messages.
class Fields {
 public:
  Fields(const json& object, std::string file, std::string path)
      : object_(object), file_(std::move(file)), path_(std::move(path)) {}

  const std::string& file() const { return file_; }
  const json& object() const { return object_; }
  std::string name_of(std::string_view key) const { return path_ + std::string(key); }

  /// Null when the field is absent or null.
  const json* find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }
  const json& require(const char* key) const {
    const json* value = find(key);
    FOVEA_CHECK(value != nullptr, corrupt_file, "{}: field {} is missing", file_, name_of(key));
    return *value;
  }

  std::int64_t integer(const char* key, std::int64_t least, std::int64_t most) const {
    const json& value = require(key);
    // Unsigned values beyond int64 are integers to the parser too.
    const bool fits = value.is_number_integer() &&
                      !(value.is_number_unsigned() &&
                        value.get<std::uint64_t>() >
                            static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
    const std::int64_t number = fits ? value.get<std::int64_t>() : 0;
    FOVEA_CHECK(fits && number >= least && number <= most, corrupt_file,
                "{}: field {} is {}, but must be an integer in [{}, {}]", file_, name_of(key),
                printable(value.dump()), least, most);
    return number;
  }
  std::int64_t dim(const char* key) const { return integer(key, 1, kMaxDim); }

  double to_number(const json& value, std::string_view key, double least) const {
    const double number = value.is_number() ? value.get<double>() : -1;
    FOVEA_CHECK(value.is_number() && number >= least && number <= kMaxNumber, corrupt_file,
                "{}: field {} is {}, but must be a number in [{}, {}]", file_, name_of(key),
                printable(value.dump()), least, kMaxNumber);
    return number;
  }
  double number(const char* key, double least) const { return to_number(require(key), key, least); }
  double number_or(const char* key, double absent, double least) const {
    const json* value = find(key);
    return value == nullptr ? absent : to_number(*value, key, least);
  }

  bool boolean_or(const char* key, bool absent) const {
    const json* value = find(key);
    if (value == nullptr) return absent;
    FOVEA_CHECK(value->is_boolean(), corrupt_file, "{}: field {} is {}, but must be true or false",
                file_, name_of(key), printable(value->dump()));
    return value->get<bool>();
  }

  std::string text(const char* key) const {
    const json& value = require(key);
    FOVEA_CHECK(value.is_string(), corrupt_file, "{}: field {} is {}, but must be text", file_,
                name_of(key), printable(value.dump()));
    return value.get<std::string>();
  }

  std::vector<double> numbers(const char* key, std::size_t count, double least) const {
    const json& value = require(key);
    FOVEA_CHECK(value.is_array() && value.size() == count, corrupt_file,
                "{}: field {} must be a list of {} numbers", file_, name_of(key), count);
    std::vector<double> result;
    for (const json& element : value) result.push_back(to_number(element, key, least));
    return result;
  }

  Fields child(const char* key) const {
    const json& value = require(key);
    FOVEA_CHECK(value.is_object(), corrupt_file, "{}: field {} is {}, but must be an object", file_,
                name_of(key), printable(value.dump()));
    return Fields(value, file_, name_of(key) + ".");
  }

  /// What is not known could change the result, so it is refused.
  void refuse_others(std::initializer_list<std::string_view> known) const {
    for (const auto& [key, value] : object_.items()) {
      const bool is_known = std::find(known.begin(), known.end(), key) != known.end();
      FOVEA_CHECK(is_known || value.is_null(), unsupported, "{}: field {} is not supported", file_,
                  printable(name_of(key)));
    }
  }

 private:
  const json& object_;
  std::string file_;
  std::string path_;
};

json parse_object(const std::string& text, const std::string& file_name) {
  FOVEA_CHECK(text.size() <= kMaxConfigBytes, corrupt_file, "{}: {} bytes are more than {}",
              file_name, text.size(), kMaxConfigBytes);
  const auto limit_depth = [&](int depth, json::parse_event_t, json&) {
    FOVEA_CHECK(depth <= kMaxDepth, corrupt_file, "{}: JSON nests deeper than {} levels", file_name,
                kMaxDepth);
    return true;
  };
  json root;
  try {
    root = json::parse(text, limit_depth);
  } catch (const json::exception& error) {
    fail(ErrorCode::corrupt_file, "{}: {}", file_name, printable(error.what()));
  }
  FOVEA_CHECK(root.is_object(), corrupt_file, "{}: must be a JSON object", file_name);
  return root;
}

const Architecture& find_architecture(const Fields& config) {
  const std::string model_type = config.text("model_type");
  std::string known;
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.model_type == model_type) return architecture;
    known += (known.empty() ? "" : ", ") + std::string(architecture.model_type);
  }
  fail(ErrorCode::unsupported, "{}: field model_type is {}, but must be one of {}", config.file(),
       printable(model_type), known);
}

void refuse_partial_rotation(const Fields& fields) {
  FOVEA_CHECK(fields.number_or("partial_rotary_factor", 1, 0) == 1, unsupported,
              "{}: field {} must be 1: qk_rope_head_dim says what is rotated", fields.file(),
              fields.name_of("partial_rotary_factor"));
}

/// Fields that change attention and that nothing here implements. Absent, null and false are fine.
void refuse_unsupported(const Fields& config) {
  if (config.find("quantization_config") != nullptr) {
    const Fields quantisation = config.child("quantization_config");
    const json* method = quantisation.find("quant_method");
    fail(ErrorCode::unsupported,
         "{}: field quantization_config (quant_method {}): quantised weights, block-scaled FP8 "
         "among them, are not read yet; convert the checkpoint to bf16",
         config.file(), method == nullptr ? "'unknown'" : printable(method->dump()));
  }
  for (const char* key :
       {"compression_config", "sliding_window", "use_sliding_window", "attention_chunk_size",
        "attn_logit_softcapping", "use_qk_norm", "qk_layernorm", "index_topk", "index_n_heads"}) {
    const json* value = config.find(key);
    FOVEA_CHECK(value == nullptr || *value == false, unsupported, "{}: field {} is not supported",
                config.file(), key);
  }
  refuse_partial_rotation(config);
  if (const json* types = config.find("layer_types")) {
    const bool full = types->is_array() && std::all_of(types->begin(), types->end(), [](auto& t) {
                        return t == "full_attention";
                      });
    FOVEA_CHECK(full, unsupported, "{}: field layer_types must hold full_attention alone",
                config.file());
  }
}

MlaDims parse_dims(const Fields& config, std::string_view model_type) {
  MlaDims dims;
  dims.hidden_size = config.dim("hidden_size");
  dims.num_heads = config.dim("num_attention_heads");
  if (config.find("num_key_value_heads") != nullptr) {
    const std::int64_t kv_heads = config.dim("num_key_value_heads");
    FOVEA_CHECK(
        kv_heads == dims.num_heads, unsupported,
        "{}: field num_key_value_heads is {}, but latent attention needs num_attention_heads"
        ", {}",
        config.file(), kv_heads, dims.num_heads);
  }
  // Null means that queries are not compressed; absent would leave it to a default.
  FOVEA_CHECK(config.object().contains("q_lora_rank"), corrupt_file,
              "{}: field q_lora_rank is missing; null stands for none", config.file());
  if (config.find("q_lora_rank") != nullptr) dims.q_lora_rank = config.dim("q_lora_rank");
  dims.kv_lora_rank = config.dim("kv_lora_rank");
  dims.qk_nope_head_dim = config.dim("qk_nope_head_dim");
  dims.qk_rope_head_dim = config.dim("qk_rope_head_dim");
  FOVEA_CHECK(dims.qk_rope_head_dim % 2 == 0, corrupt_file,
              "{}: field qk_rope_head_dim is {}, but must be even", config.file(),
              dims.qk_rope_head_dim);
  if (model_type == "minicpm3" && config.find("v_head_dim") == nullptr) {
    dims.v_head_dim = dims.hidden_size / dims.num_heads;
  } else {
    dims.v_head_dim = config.dim("v_head_dim");
  }
  return dims;
}

/// Text of the scaling's type, under either of its two names.
std::string rope_type(const Fields& rope) {
  const bool has_new = rope.find("rope_type") != nullptr;
  const bool has_old = rope.find("type") != nullptr;
  if (!has_new && !has_old) return "default";
  const std::string type = rope.text(has_new ? "rope_type" : "type");
  FOVEA_CHECK(!has_new || !has_old || rope.text("type") == type, corrupt_file,
              "{}: fields {} and {} differ: {} and {}", rope.file(), rope.name_of("rope_type"),
              rope.name_of("type"), printable(type), printable(rope.text("type")));
  return type;
}

std::int64_t original_max_position(const Fields& config, const Fields& rope) {
  constexpr const char* kKey = "original_max_position_embeddings";
  return (config.find(kKey) != nullptr ? config : rope).integer(kKey, 2, kMaxDim);
}

YarnScaling parse_yarn(const Fields& config, const Fields& rope) {
  rope.refuse_others({"rope_type", "type", "rope_theta", "factor", "beta_fast", "beta_slow",
                      "mscale", "mscale_all_dim", "original_max_position_embeddings", "truncate",
                      "partial_rotary_factor"});
  FOVEA_CHECK(rope.boolean_or("truncate", true), unsupported,
              "{}: field {} must be true: correction ranges are whole channels", rope.file(),
              rope.name_of("truncate"));
  YarnScaling yarn;
  yarn.factor = rope.number("factor", 1);
  yarn.original_max_position = original_max_position(config, rope);
  constexpr double kLeastRotations = 1e-3;
  yarn.beta_fast = rope.number_or("beta_fast", 32, kLeastRotations);
  yarn.beta_slow = rope.number_or("beta_slow", 1, kLeastRotations);
  yarn.mscale = rope.number_or("mscale", 1, 0);
  yarn.mscale_all_dim = rope.number_or("mscale_all_dim", 0, 0);
  // With one of them alone, DeepSeek's own code and transformers give different amplitudes.
  const bool both = yarn.mscale != 0 && yarn.mscale_all_dim != 0;
  const bool plain = yarn.mscale == 1 && yarn.mscale_all_dim == 0;
  FOVEA_CHECK((both && rope.find("mscale") != nullptr) || plain, unsupported,
              "{}: fields {} ({}) and {} ({}) must both be there and not zero, or both absent",
              rope.file(), rope.name_of("mscale"), yarn.mscale, rope.name_of("mscale_all_dim"),
              yarn.mscale_all_dim);
  return yarn;
}

LongRopeScaling parse_longrope(const Fields& config, const Fields& rope, const RopeConfig& base) {
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

/// transformers 5 writes rope_parameters, with rope_theta inside; earlier files have rope_scaling
/// and rope_theta side by side.
RopeConfig parse_rope(const Fields& config, const Architecture& architecture, const MlaDims& dims,
                      std::int64_t max_position) {
  RopeConfig rope;
  rope.dim = dims.qk_rope_head_dim;
  rope.max_position = max_position;
  rope.pairing = architecture.pairing;
  const bool interleaved = architecture.pairing == RopePairing::interleaved;
  if (config.boolean_or("rope_interleave", interleaved) != interleaved) {
    FOVEA_CHECK(architecture.pairing_is_configurable, unsupported,
                "{}: field rope_interleave must be {} for {}", config.file(), interleaved,
                architecture.model_type);
    rope.pairing = interleaved ? RopePairing::neox : RopePairing::interleaved;
  }

  const char* key = config.find("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
  FOVEA_CHECK(config.find("rope_parameters") == nullptr || config.find("rope_scaling") == nullptr,
              corrupt_file, "{}: fields rope_parameters and rope_scaling exclude each other",
              config.file());
  constexpr double kDefaultTheta = 10000;  // Of every model type here.
  rope.theta = config.number_or("rope_theta", kDefaultTheta, 1);
  if (config.find(key) != nullptr) {
    const Fields scaling = config.child(key);
    rope.theta = scaling.number_or("rope_theta", rope.theta, 1);
    refuse_partial_rotation(scaling);
    const std::string type = rope_type(scaling);
    if (type == "yarn") {
      rope.scaling = parse_yarn(config, scaling);
    } else if (type == "longrope") {
      rope.scaling = parse_longrope(config, scaling, rope);
    } else {
      FOVEA_CHECK(type == "default", unsupported,
                  "{}: field {} is {}, but must be default, yarn or longrope", config.file(),
                  scaling.name_of("rope_type"), printable(type));
      // Left over from a scaling that is switched off, these change nothing.
      scaling.refuse_others({"rope_type", "type", "rope_theta", "partial_rotary_factor",
                             "original_max_position_embeddings"});
    }
  }
  FOVEA_CHECK(rope.theta > 1, corrupt_file, "{}: field rope_theta is {}, but must be above 1",
              config.file(), rope.theta);
  return rope;
}

/// (P + R)^-0.5, times YaRN's mscale(factor, mscale_all_dim)^2.
float softmax_scale(const MlaDims& dims, const RopeConfig& rope) {
  double scale = 1 / std::sqrt(static_cast<double>(dims.qk_head_dim()));
  if (const auto* yarn = std::get_if<YarnScaling>(&rope.scaling);
      yarn && yarn->mscale_all_dim != 0) {
    const double mscale = yarn_mscale(yarn->factor, yarn->mscale_all_dim);
    scale *= mscale * mscale;
  }
  return static_cast<float>(scale);
}

DType parse_checkpoint_dtype(const Fields& config) {
  const char* key = config.find("dtype") != nullptr ? "dtype" : "torch_dtype";
  if (config.find(key) == nullptr) return DType::f32;  // What transformers assumes.
  const std::string name = config.text(key);
  if (name == "float32") return DType::f32;
  if (name == "float16") return DType::f16;
  FOVEA_CHECK(name == "bfloat16", unsupported,
              "{}: field {} is {}, but must be float32, float16 or bfloat16", config.file(), key,
              printable(name));
  return DType::bf16;
}

/// scale_depth / sqrt(layers); null stands for no scaling.
float residual_scale(const Fields& config, std::int64_t num_layers) {
  FOVEA_CHECK(config.object().contains("scale_depth"), corrupt_file,
              "{}: field scale_depth is missing; null stands for none", config.file());
  const double layers = std::sqrt(static_cast<double>(num_layers));
  return static_cast<float>(config.number_or("scale_depth", layers, 0) / layers);
}

}  // namespace

ModelConfig parse_model_config(const std::string& json_text, const std::string& file_name) {
  const json root = parse_object(json_text, file_name);
  const Fields fields(root, file_name, "");
  const Architecture& architecture = find_architecture(fields);
  refuse_unsupported(fields);

  ModelConfig config;
  config.model_type = architecture.model_type;
  config.num_layers = fields.dim("num_hidden_layers");
  config.mla = parse_dims(fields, config.model_type);
  config.hidden_size = config.mla.hidden_size;
  config.max_position = fields.dim("max_position_embeddings");
  const RopeConfig rope = parse_rope(fields, architecture, config.mla, config.max_position);
  config.groups = {{AttentionVariant{}, rope}};
  config.layer_group.assign(static_cast<std::size_t>(config.num_layers), 0);
  config.mla.sm_scale = softmax_scale(config.mla, rope);
  config.rms_norm_eps = static_cast<float>(fields.number("rms_norm_eps", 0));
  config.attention_bias = fields.boolean_or("attention_bias", false);
  config.o_bias = config.attention_bias;
  config.vocab_size = fields.dim("vocab_size");
  config.dtype = parse_checkpoint_dtype(fields);
  if (config.model_type == "minicpm3") {
    config.residual_scale = residual_scale(fields, config.num_layers);
  }
  return config;
}

}  // namespace fovea
