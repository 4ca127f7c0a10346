// Published dimensions of models with grouped-query attention.
#include "model/gqa_presets.h"

#include <string>
#include <utility>

namespace fovea {

namespace {

/// eps 1e-5, as most of them.
ModelConfig base(std::string model_type, std::int64_t num_layers, const GqaDims& dims) {
  ModelConfig config;
  config.model_type = std::move(model_type);
  config.num_layers = num_layers;
  config.hidden_size = dims.hidden_size;
  config.gqa = dims;
  config.rms_norm_eps = 1e-5f;
  config.layer_group.assign(static_cast<std::size_t>(num_layers), 0);
  return config;
}

KvGroupConfig group(const ModelConfig& config, double theta) {
  KvGroupConfig result;
  result.rope.dim = config.gqa.head_dim;
  result.rope.theta = theta;
  result.rope.max_position = config.max_position;
  result.rope.pairing = RopePairing::neox;
  return result;
}

/// Every `period`-th layer sees all keys, the others the last `window`.
void alternate(ModelConfig& config, std::int64_t window, std::int32_t period,
               KvGroupConfig windowed, KvGroupConfig full) {
  windowed.variant.window_left = window_left_of(window);
  config.groups = {std::move(windowed), std::move(full)};
  std::int32_t index = 0;
  for (std::int32_t& of_layer : config.layer_group) of_layer = ++index % period == 0 ? 1 : 0;
}

ModelConfig gpt_oss(std::int64_t num_layers) {
  ModelConfig config =
      base("gpt_oss", num_layers,
           {.hidden_size = 2880, .num_heads = 64, .num_kv_heads = 8, .head_dim = 64});
  config.attention_bias = true;
  config.o_bias = true;
  config.sinks = true;
  config.vocab_size = 201088;
  config.max_position = 131072;
  KvGroupConfig both = group(config, 150000);
  both.rope.scaling = YarnScaling{.factor = 32, .original_max_position = 4096, .truncate = false};
  alternate(config, 128, 2, both, both);
  return config;
}

ModelConfig llama_2_7b() {
  ModelConfig config = base(
      "llama", 32, {.hidden_size = 4096, .num_heads = 32, .num_kv_heads = 32, .head_dim = 128});
  config.vocab_size = 32000;
  config.max_position = 4096;
  config.dtype = DType::f16;
  config.groups = {group(config, 10000)};
  return config;
}

ModelConfig llama_3_8b() {
  ModelConfig config =
      base("llama", 32, {.hidden_size = 4096, .num_heads = 32, .num_kv_heads = 8, .head_dim = 128});
  config.vocab_size = 128256;
  config.max_position = 8192;
  config.groups = {group(config, 500000)};
  return config;
}

ModelConfig qwen2_7b() {
  ModelConfig config =
      base("qwen2", 28, {.hidden_size = 3584, .num_heads = 28, .num_kv_heads = 4, .head_dim = 128});
  config.rms_norm_eps = 1e-6f;
  config.attention_bias = true;
  config.vocab_size = 152064;
  config.max_position = 131072;
  config.groups = {group(config, 1000000)};
  return config;
}

ModelConfig qwen3_8b() {
  ModelConfig config =
      base("qwen3", 36, {.hidden_size = 4096, .num_heads = 32, .num_kv_heads = 8, .head_dim = 128});
  config.rms_norm_eps = 1e-6f;
  config.qk_norm = QkNorm::pre_rope;
  config.vocab_size = 151936;
  config.max_position = 40960;
  config.groups = {group(config, 1000000)};
  return config;
}

/// Version 0.1, the one with a window.
ModelConfig mistral_7b() {
  ModelConfig config = base(
      "mistral", 32, {.hidden_size = 4096, .num_heads = 32, .num_kv_heads = 8, .head_dim = 128});
  config.vocab_size = 32000;
  config.max_position = 32768;
  config.groups = {group(config, 10000)};
  config.groups[0].variant.window_left = window_left_of(4096);
  return config;
}

ModelConfig gemma_3_4b() {
  ModelConfig config = base(
      "gemma3_text", 34, {.hidden_size = 2560, .num_heads = 8, .num_kv_heads = 4, .head_dim = 256});
  config.rms_norm_eps = 1e-6f;
  config.qk_norm = QkNorm::pre_rope;
  config.post_attention_norm = true;
  config.norm_weights_minus_one = true;
  config.vocab_size = 262208;
  config.max_position = 131072;
  KvGroupConfig full = group(config, 1000000);
  full.rope.scaling = LinearScaling{.factor = 8};
  alternate(config, 1024, 6, group(config, 10000), full);
  return config;
}

}  // namespace

std::vector<PresetInfo> gqa_presets() {
  std::vector<PresetInfo> presets = {
      {"gpt-oss-20b", gpt_oss(24)}, {"gpt-oss-120b", gpt_oss(36)}, {"llama-2-7b", llama_2_7b()},
      {"llama-3-8b", llama_3_8b()}, {"qwen2-7b", qwen2_7b()},      {"qwen3-8b", qwen3_8b()},
      {"mistral-7b", mistral_7b()}, {"gemma-3-4b", gemma_3_4b()},
  };
  for (PresetInfo& preset : presets) preset.config.gqa = preset.config.gqa.validated();
  return presets;
}

}  // namespace fovea
