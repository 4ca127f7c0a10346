// gpt-oss, Llama, Qwen2, Qwen3, Mistral and Gemma 3.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>

#include "core/check.h"
#include "model/architectures.h"
#include "model/rope_fields.h"

namespace fovea {

namespace {

/// How a file says which layers have a window.
enum class Windows {
  none,
  switched,     ///< use_sliding_window turns on layer_types, or the layers from max_window_layers.
  every_layer,  ///< sliding_window alone; null is none.
  by_type,      ///< layer_types.
  by_pattern,   ///< layer_types, or all but each sliding_window_pattern-th.
};

struct Family {
  std::string_view model_type;
  Windows windows;
  bool bias;  ///< What attention_bias is when absent.
  bool bias_is_fixed;
  bool o_has_bias;  ///< o_proj has one where q, k and v do.
  bool qk_norm;
  double theta;  ///< What rope_theta is when absent.
  /// Absent fields have the values that transformers gives them: published files rely on it.
  bool has_defaults;
};
constexpr Family kFamilies[] = {
    {"gpt_oss", Windows::by_type, true, false, true, false, 150000, false},
    {"llama", Windows::none, false, false, true, false, 10000, false},
    {"qwen2", Windows::switched, true, true, false, false, 10000, false},
    {"qwen3", Windows::switched, false, false, true, true, 10000, false},
    {"mistral", Windows::every_layer, false, true, false, false, 10000, false},
    {"gemma3_text", Windows::by_pattern, false, false, true, true, 1000000, true},
};

const Family& find_family(std::string_view model_type) {
  return *std::find_if(std::begin(kFamilies), std::end(kFamilies),
                       [&](const Family& f) { return f.model_type == model_type; });
}

bool is_gemma(const ModelConfig& config) { return config.model_type == "gemma3_text"; }

/// A field that published files of a family with defaults may leave out, but not set to null.
std::int64_t dim(const ConfigFields& fields, const Family& family, const char* key,
                 std::int64_t absent) {
  const bool may_be_absent = family.has_defaults && !fields.is_null(key);
  return may_be_absent ? fields.dim_or(key, absent) : fields.dim(key);
}

GqaDims parse_dims(const ConfigFields& fields, const ModelConfig& config, const Family& family) {
  GqaDims dims;
  dims.hidden_size = config.hidden_size;
  dims.num_heads = dim(fields, family, "num_attention_heads", 8);
  dims.num_kv_heads = family.has_defaults ? dim(fields, family, "num_key_value_heads", 4)
                                          : fields.dim_or("num_key_value_heads", dims.num_heads);
  FOVEA_CHECK(dims.num_heads % dims.num_kv_heads == 0, corrupt_file,
              "{}: field num_key_value_heads is {}, but must divide num_attention_heads, {}",
              fields.file(), dims.num_kv_heads, dims.num_heads);
  if (family.has_defaults) {
    dims.head_dim = dim(fields, family, "head_dim", 256);
  } else if (family.qk_norm || config.model_type == "gpt_oss") {
    dims.head_dim = fields.dim("head_dim");  // Not hidden_size / num_attention_heads by default.
  } else {
    FOVEA_CHECK(fields.has("head_dim") || dims.hidden_size % dims.num_heads == 0, corrupt_file,
                "{}: field head_dim is missing, and hidden_size {} is no multiple of "
                "num_attention_heads, {}",
                fields.file(), dims.hidden_size, dims.num_heads);
    dims.head_dim = fields.dim_or("head_dim", dims.hidden_size / dims.num_heads);
  }
  FOVEA_CHECK(dims.head_dim % 2 == 0, corrupt_file,
              "{}: field head_dim is {}, but must be even: all of its channels turn in pairs",
              fields.file(), dims.head_dim);
  dims.v_head_dim = dims.head_dim;
  constexpr double kLeastScalar = 1e-6;
  const auto head_dim = static_cast<double>(dims.head_dim);
  const double scalar =
      is_gemma(config) ? fields.number_or("query_pre_attn_scalar", 256, kLeastScalar) : head_dim;
  dims.sm_scale = static_cast<float>(1 / std::sqrt(scalar));
  return dims;
}

/// Fields of other families that change attention.
void refuse_others(const ConfigFields& fields, const ModelConfig& config, const Family& family) {
  fields.refuse({"kv_lora_rank", "no_rope_layers", "attn_temperature_tuning",
                 "attention_multiplier", "use_bidirectional_attention", "rope_interleave"});
  if (!is_gemma(config)) {
    fields.refuse({"attn_logit_softcapping", "query_pre_attn_scalar", "sliding_window_pattern",
                   "rope_local_base_freq"});
  }
  if (family.windows == Windows::none) fields.refuse({"sliding_window"});
  if (family.windows != Windows::switched) fields.refuse({"use_sliding_window"});
}

bool is_sliding(const std::string& type) { return type == "sliding_attention"; }

std::vector<bool> windows_of(const std::vector<std::string>& types) {
  std::vector<bool> result;
  for (const std::string& type : types) result.push_back(is_sliding(type));
  return result;
}

/// For each layer whether it has a window.
std::vector<bool> windowed_layers(const ConfigFields& fields, const ModelConfig& config,
                                  Windows windows) {
  const std::vector<std::string> types = parse_layer_types(fields, config.num_layers);
  const auto layers = static_cast<std::size_t>(config.num_layers);
  std::vector<bool> result(layers, false);
  switch (windows) {
    case Windows::none:
      break;
    case Windows::switched:
      if (!fields.boolean_or("use_sliding_window", false)) break;
      if (!types.empty()) return windows_of(types);
      for (auto i = static_cast<std::size_t>(fields.integer("max_window_layers", 0, kMaxDim));
           i < layers; ++i) {
        result[i] = true;
      }
      return result;
    case Windows::every_layer:
      FOVEA_CHECK(fields.has("sliding_window") || fields.is_null("sliding_window"), corrupt_file,
                  "{}: field sliding_window is missing; null stands for none", fields.file());
      result.assign(layers, fields.has("sliding_window"));
      break;
    case Windows::by_type:
      FOVEA_CHECK(!types.empty(), corrupt_file, "{}: field layer_types is missing", fields.file());
      return windows_of(types);
    case Windows::by_pattern: {
      if (!types.empty()) return windows_of(types);
      // Newer files write the underscore.
      const char* key = fields.has("_sliding_window_pattern") ? "_sliding_window_pattern"
                                                              : "sliding_window_pattern";
      const auto pattern = static_cast<std::size_t>(fields.dim_or(key, 6));
      for (std::size_t i = 0; i < layers; ++i) result[i] = (i + 1) % pattern != 0;
      return result;
    }
  }
  // Where other fields decide, layer_types may only repeat what they say.
  FOVEA_CHECK(types.empty() || windows_of(types) == result, unsupported,
              "{}: field layer_types must hold {} alone for {} with these window fields",
              fields.file(), result[0] ? "sliding_attention" : "full_attention", config.model_type);
  return result;
}

std::int64_t parse_window(const ConfigFields& fields, const Family& family) {
  constexpr std::int64_t kGemmaWindow = 4096;
  return window_left_of(dim(fields, family, "sliding_window", kGemmaWindow));
}

/// Gemma turns windowed layers by rope_local_base_freq, without any scaling, or by
/// rope_parameters of each layer type.
RopeConfig parse_gemma_rope(const ConfigFields& fields, const RopeConfig& base, bool windowed) {
  RopeConfig rope = base;
  if (windowed) rope.theta = 10000;
  if (fields.has("rope_parameters")) {
    FOVEA_CHECK(!fields.has("rope_scaling"), corrupt_file,
                "{}: fields rope_parameters and rope_scaling exclude each other", fields.file());
    const ConfigFields types = fields.child("rope_parameters");
    types.refuse_others({"full_attention", "sliding_attention"});
    const char* key = windowed ? "sliding_attention" : "full_attention";
    return types.has(key) ? parse_rope_object(fields, types.child(key), rope) : rope;
  }
  if (!windowed) return parse_rope(fields, rope);
  constexpr double kLeastTheta = 1 + 1e-6;
  rope.theta = fields.number_or("rope_local_base_freq", rope.theta, kLeastTheta);
  return rope;
}

KvGroupConfig make_group(const ConfigFields& fields, const ModelConfig& config,
                         const Family& family, bool windowed) {
  KvGroupConfig group;
  if (windowed) group.variant.window_left = parse_window(fields, family);
  constexpr double kLeastCap = 1e-3;
  if (fields.has("attn_logit_softcapping")) {
    group.variant.soft_cap = static_cast<float>(fields.number("attn_logit_softcapping", kLeastCap));
  }
  RopeConfig base;
  base.dim = config.gqa.head_dim;
  base.max_position = config.max_position;
  base.pairing = RopePairing::neox;
  base.theta = family.theta;
  group.rope =
      is_gemma(config) ? parse_gemma_rope(fields, base, windowed) : parse_rope(fields, base);
  return group;
}

/// Groups in the order of their first layers.
void assign_groups(const ConfigFields& fields, const Family& family, ModelConfig& config) {
  const std::vector<bool> windowed = windowed_layers(fields, config, family.windows);
  for (const bool is_windowed : windowed) {
    const bool differs = is_windowed != windowed[0];
    const auto group = static_cast<std::int32_t>(differs);
    config.layer_group.push_back(group);
    if (config.groups.size() == static_cast<std::size_t>(group)) {
      config.groups.push_back(make_group(fields, config, family, is_windowed));
    }
  }
}

/// gpt-oss also has files of its own first form, whose rotation is not read.
void check_gpt_oss(const ConfigFields& fields, const ModelConfig& config) {
  fields.refuse({"rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta"});
  const auto* yarn = std::get_if<YarnScaling>(&config.groups[0].rope.scaling);
  FOVEA_CHECK(yarn != nullptr, corrupt_file,
              "{}: field rope_scaling or rope_parameters with rope_type yarn is missing",
              fields.file());
  const std::int64_t length = fields.dim_or("initial_context_length", yarn->original_max_position);
  FOVEA_CHECK(length == yarn->original_max_position, corrupt_file,
              "{}: field initial_context_length is {}, but original_max_position_embeddings is {}",
              fields.file(), length, yarn->original_max_position);
}

}  // namespace

const std::vector<std::string>& gqa_model_types() {
  static const std::vector<std::string> types = [] {
    std::vector<std::string> names;
    for (const Family& family : kFamilies) names.emplace_back(family.model_type);
    return names;
  }();
  return types;
}

void parse_gqa(const ConfigFields& fields, ModelConfig& config) {
  const Family& family = find_family(config.model_type);
  refuse_others(fields, config, family);
  config.gqa = parse_dims(fields, config, family);
  config.max_position = dim(fields, family, "max_position_embeddings", 131072);
  assign_groups(fields, family, config);
  if (config.model_type == "gpt_oss") check_gpt_oss(fields, config);

  constexpr double kGemmaEps = 1e-6;
  config.rms_norm_eps =
      static_cast<float>(family.has_defaults ? fields.number_or("rms_norm_eps", kGemmaEps, 0)
                                             : fields.number("rms_norm_eps", 0));
  config.attention_bias = fields.boolean_or("attention_bias", family.bias);
  FOVEA_CHECK(!family.bias_is_fixed || config.attention_bias == family.bias, unsupported,
              "{}: field attention_bias must be {} for {}", fields.file(), family.bias,
              config.model_type);
  config.o_bias = config.attention_bias && family.o_has_bias;
  config.qk_norm = family.qk_norm ? QkNorm::pre_rope : QkNorm::none;
  config.sinks = config.model_type == "gpt_oss";
  config.post_attention_norm = is_gemma(config);
  config.norm_weights_minus_one = is_gemma(config);
  config.vocab_size = dim(fields, family, "vocab_size", 262208);
}

}  // namespace fovea
