// config.json, as far as attention needs it.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "fovea/model.h"
#include "model/architectures.h"
#include "model/config_fields.h"
#include "model/json_events.h"
#include "model/quantization.h"
#include "model/rope_fields.h"

namespace fovea {

namespace {

/// A hundred times the deepest known: a file's claim costs little memory.
constexpr std::int64_t kMaxLayers = 1 << 14;

/// Gemma 3 with vision nests its language model, and says the dtype outside.
constexpr const char* kNestingType = "gemma3";
constexpr const char* kNestedType = "gemma3_text";

bool is_one_of(const std::string& type, const std::vector<std::string>& types) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

void check_model_type(const ConfigFields& fields, const std::string& model_type) {
  std::string known;
  for (const auto* types : {&mla_model_types(), &gqa_model_types()}) {
    for (const std::string& type : *types) {
      if (type == model_type) return;
      known += (known.empty() ? "" : ", ") + type;
    }
  }
  fail(ErrorCode::unsupported, "{}: field {} is {}, but must be {}, or one of {}", fields.file(),
       fields.name_of("model_type"), printable(model_type), kNestingType, known);
}

/// gpt-oss keeps its attention in bf16 while its experts are quantised, and says so.
bool spares_attention(const ConfigFields& quantisation) {
  constexpr const char* kKey = "modules_to_not_convert";
  return quantisation.has(kKey) && is_one_of("model.layers.*.self_attn", quantisation.texts(kKey));
}

WeightQuantization parse_quantization(const ConfigFields& fields) {
  constexpr const char* kKey = "quantization_config";
  if (!fields.has(kKey) || spares_attention(fields.child(kKey))) return {};
  return parse_weight_quantization(fields.child(kKey));
}

bool has_dtype(const ConfigFields& fields) {
  return fields.has("dtype") || fields.has("torch_dtype");
}

DType parse_checkpoint_dtype(const ConfigFields& fields) {
  if (!has_dtype(fields)) return DType::f32;  // What transformers assumes.
  const char* key = fields.has("dtype") ? "dtype" : "torch_dtype";
  const std::string name = fields.text(key);
  if (name == "float32") return DType::f32;
  if (name == "float16") return DType::f16;
  FOVEA_CHECK(name == "bfloat16", unsupported,
              "{}: field {} is {}, but must be float32, float16 or bfloat16", fields.file(),
              fields.name_of(key), printable(name));
  return DType::bf16;
}

/// `outer` and `fields` are the same but for a nested language model.
ModelConfig parse_fields(const ConfigFields& outer, const ConfigFields& fields,
                         const std::string& model_type) {
  // Of these every model type here has the same, or none.
  fields.refuse({"compression_config", "attention_chunk_size", "use_qk_norm", "qk_layernorm",
                 "index_topk", "index_n_heads", "dual_chunk_attention_config", "use_mrope",
                 "clip_qkv", "rotary_pct"});
  refuse_partial_rotation(fields);

  ModelConfig config;
  config.model_type = model_type;
  config.num_layers = fields.integer("num_hidden_layers", 1, kMaxLayers);
  config.hidden_size = fields.dim("hidden_size");
  config.dtype = parse_checkpoint_dtype(has_dtype(fields) ? fields : outer);
  config.quantization = parse_quantization(fields.has("quantization_config") ? fields : outer);
  is_one_of(model_type, mla_model_types()) ? parse_mla(fields, config) : parse_gqa(fields, config);
  return config;
}

}  // namespace

std::vector<std::string> parse_layer_types(const ConfigFields& fields, std::int64_t num_layers) {
  constexpr const char* kKey = "layer_types";
  if (!fields.has(kKey)) return {};
  const std::vector<std::string> types = fields.texts(kKey);
  FOVEA_CHECK(types.size() == static_cast<std::size_t>(num_layers), corrupt_file,
              "{}: field {} has {} entries, but num_hidden_layers is {}", fields.file(),
              fields.name_of(kKey), types.size(), num_layers);
  for (const std::string& type : types) {
    FOVEA_CHECK(type == "full_attention" || type == "sliding_attention", unsupported,
                "{}: field {} holds {}, but each must be full_attention or sliding_attention",
                fields.file(), fields.name_of(kKey), printable(type));
  }
  return types;
}

ModelConfig parse_model_config(const std::string& json_text, const std::string& file_name) {
  const nlohmann::json root = parse_config_object(json_text, file_name);
  const ConfigFields outer(root, file_name);
  const std::string model_type = outer.text("model_type");
  if (model_type != kNestingType) {
    check_model_type(outer, model_type);
    return parse_fields(outer, outer, model_type);
  }
  const ConfigFields text = outer.child("text_config");
  const std::string nested = text.has("model_type") ? text.text("model_type") : kNestedType;
  FOVEA_CHECK(nested == kNestedType, unsupported, "{}: field {} is {}, but must be {}", file_name,
              text.name_of("model_type"), printable(nested), kNestedType);
  return parse_fields(outer, text, nested);
}

}  // namespace fovea
