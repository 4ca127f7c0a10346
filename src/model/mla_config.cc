// DeepSeek-V2 and its kin.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>

#include "core/check.h"
#include "model/architectures.h"
#include "model/rope_fields.h"

namespace fovea {

namespace {

struct Family {
  std::string_view model_type;
  RopePairing pairing;
  /// rope_interleave may choose the pairing; elsewhere it may only repeat what the formula has.
  bool pairing_is_configurable;
};
constexpr Family kFamilies[] = {
    {"deepseek_v2", RopePairing::interleaved, false},
    {"deepseek_v3", RopePairing::interleaved, true},
    {"kimi_k2", RopePairing::interleaved, true},
    {"minicpm3", RopePairing::neox, false},
    {"glm4_moe_lite", RopePairing::interleaved, true},
};

const Family& find_family(std::string_view model_type) {
  return *std::find_if(std::begin(kFamilies), std::end(kFamilies),
                       [&](const Family& f) { return f.model_type == model_type; });
}

/// Fields that change attention and that these models never have.
void refuse_others(const ConfigFields& fields, std::int64_t num_layers) {
  fields.refuse({"sliding_window", "use_sliding_window", "attn_logit_softcapping"});
  for (const std::string& type : parse_layer_types(fields, num_layers)) {
    FOVEA_CHECK(type == "full_attention", unsupported,
                "{}: field layer_types must hold full_attention alone", fields.file());
  }
}

MlaDims parse_dims(const ConfigFields& fields, const ModelConfig& config) {
  MlaDims dims;
  dims.hidden_size = config.hidden_size;
  dims.num_heads = fields.dim("num_attention_heads");
  const std::int64_t kv_heads = fields.dim_or("num_key_value_heads", dims.num_heads);
  FOVEA_CHECK(
      kv_heads == dims.num_heads, unsupported,
      "{}: field num_key_value_heads is {}, but latent attention needs num_attention_heads, {}",
      fields.file(), kv_heads, dims.num_heads);
  // Null means that queries are not compressed; absent would leave it to a default.
  if (!fields.is_null("q_lora_rank")) {
    FOVEA_CHECK(fields.has("q_lora_rank"), corrupt_file,
                "{}: field q_lora_rank is missing; null stands for none", fields.file());
    dims.q_lora_rank = fields.dim("q_lora_rank");
  }
  dims.kv_lora_rank = fields.dim("kv_lora_rank");
  dims.qk_nope_head_dim = fields.dim("qk_nope_head_dim");
  dims.qk_rope_head_dim = fields.dim("qk_rope_head_dim");
  FOVEA_CHECK(dims.qk_rope_head_dim % 2 == 0, corrupt_file,
              "{}: field qk_rope_head_dim is {}, but must be even", fields.file(),
              dims.qk_rope_head_dim);
  if (config.model_type == "minicpm3" && !fields.has("v_head_dim")) {
    dims.v_head_dim = dims.hidden_size / dims.num_heads;
  } else {
    dims.v_head_dim = fields.dim("v_head_dim");
  }
  return dims;
}

RopePairing parse_pairing(const ConfigFields& fields, const Family& family) {
  const bool interleaved = family.pairing == RopePairing::interleaved;
  if (fields.boolean_or("rope_interleave", interleaved) == interleaved) return family.pairing;
  FOVEA_CHECK(family.pairing_is_configurable, unsupported,
              "{}: field rope_interleave must be {} for {}", fields.file(), interleaved,
              family.model_type);
  return interleaved ? RopePairing::neox : RopePairing::interleaved;
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

/// scale_depth / sqrt(layers); null stands for no scaling.
float residual_scale(const ConfigFields& fields, std::int64_t num_layers) {
  if (fields.is_null("scale_depth")) return 1;
  FOVEA_CHECK(fields.has("scale_depth"), corrupt_file,
              "{}: field scale_depth is missing; null stands for none", fields.file());
  const double layers = std::sqrt(static_cast<double>(num_layers));
  return static_cast<float>(fields.number("scale_depth", 0) / layers);
}

}  // namespace

const std::vector<std::string>& mla_model_types() {
  static const std::vector<std::string> types = [] {
    std::vector<std::string> names;
    for (const Family& family : kFamilies) names.emplace_back(family.model_type);
    return names;
  }();
  return types;
}

void parse_mla(const ConfigFields& fields, ModelConfig& config) {
  const Family& family = find_family(config.model_type);
  refuse_others(fields, config.num_layers);
  config.mla = parse_dims(fields, config);
  config.max_position = fields.dim("max_position_embeddings");
  RopeConfig base;
  base.dim = config.mla.qk_rope_head_dim;
  base.max_position = config.max_position;
  base.pairing = parse_pairing(fields, family);
  config.groups = {{AttentionVariant{}, parse_rope(fields, base)}};
  config.layer_group.assign(static_cast<std::size_t>(config.num_layers), 0);
  config.mla.sm_scale = softmax_scale(config.mla, config.groups[0].rope);
  config.rms_norm_eps = static_cast<float>(fields.number("rms_norm_eps", 0));
  config.attention_bias = fields.boolean_or("attention_bias", false);
  config.o_bias = config.attention_bias;
  config.vocab_size = fields.dim("vocab_size");
  if (config.model_type == "minicpm3") {
    config.residual_scale = residual_scale(fields, config.num_layers);
  }
}

}  // namespace fovea
