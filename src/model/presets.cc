// Published dimensions of well-known models: their config.json, without the checkpoint. Here those
// with latent attention.
#include <cmath>
#include <utility>

#include "fovea/model.h"
#include "model/gqa_presets.h"

namespace fovea {

namespace {

/// bf16 and eps 1e-6, as DeepSeek's.
ModelConfig base(std::string model_type, std::int64_t num_layers, const MlaDims& dims) {
  ModelConfig config;
  config.model_type = std::move(model_type);
  config.num_layers = num_layers;
  config.hidden_size = dims.hidden_size;
  config.mla = dims;
  config.groups.resize(1);
  config.groups[0].rope.dim = dims.qk_rope_head_dim;
  config.layer_group.assign(static_cast<std::size_t>(num_layers), 0);
  return config;
}

void set_positions(ModelConfig& config, std::int64_t max_position, double theta) {
  config.max_position = max_position;
  config.groups[0].rope.max_position = max_position;
  config.groups[0].rope.theta = theta;
}

void set_yarn(ModelConfig& config, const YarnScaling& yarn) {
  config.groups[0].rope.scaling = yarn;
  const double mscale = yarn_mscale(yarn.factor, yarn.mscale_all_dim);
  config.mla.sm_scale = static_cast<float>(
      mscale * mscale / std::sqrt(static_cast<double>(config.mla.qk_head_dim())));
}

ModelConfig deepseek_v2() {
  ModelConfig config = base("deepseek_v2", 60,
                            {.hidden_size = 5120,
                             .num_heads = 128,
                             .q_lora_rank = 1536,
                             .kv_lora_rank = 512,
                             .qk_nope_head_dim = 128,
                             .qk_rope_head_dim = 64,
                             .v_head_dim = 128});
  config.vocab_size = 102400;
  set_positions(config, 163840, 10000);
  set_yarn(config, {.factor = 40, .mscale = 0.707, .mscale_all_dim = 0.707});
  return config;
}

ModelConfig deepseek_v2_lite() {
  ModelConfig config = base("deepseek_v2", 27,
                            {.hidden_size = 2048,
                             .num_heads = 16,
                             .q_lora_rank = 0,
                             .kv_lora_rank = 512,
                             .qk_nope_head_dim = 128,
                             .qk_rope_head_dim = 64,
                             .v_head_dim = 128});
  config.vocab_size = 102400;
  set_positions(config, 163840, 10000);
  set_yarn(config, {.factor = 40, .mscale = 0.707, .mscale_all_dim = 0.707});
  return config;
}

ModelConfig deepseek_v3() {
  ModelConfig config = base("deepseek_v3", 61,
                            {.hidden_size = 7168,
                             .num_heads = 128,
                             .q_lora_rank = 1536,
                             .kv_lora_rank = 512,
                             .qk_nope_head_dim = 128,
                             .qk_rope_head_dim = 64,
                             .v_head_dim = 128});
  config.vocab_size = 129280;
  set_positions(config, 163840, 10000);
  set_yarn(config, {.factor = 40, .mscale = 1, .mscale_all_dim = 1});
  return config;
}

ModelConfig kimi_k2() {
  ModelConfig config = base("kimi_k2", 61,
                            {.hidden_size = 7168,
                             .num_heads = 64,
                             .q_lora_rank = 1536,
                             .kv_lora_rank = 512,
                             .qk_nope_head_dim = 128,
                             .qk_rope_head_dim = 64,
                             .v_head_dim = 128});
  config.vocab_size = 163840;
  set_positions(config, 131072, 50000);
  set_yarn(config,
           {.factor = 32, .beta_fast = 1, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 1});
  return config;
}

ModelConfig minicpm3_4b() {
  ModelConfig config = base("minicpm3", 62,
                            {.hidden_size = 2560,
                             .num_heads = 40,
                             .q_lora_rank = 768,
                             .kv_lora_rank = 256,
                             .qk_nope_head_dim = 64,
                             .qk_rope_head_dim = 32,
                             .v_head_dim = 64});
  config.vocab_size = 73448;
  config.rms_norm_eps = 1e-5f;
  config.residual_scale = static_cast<float>(1.4 / std::sqrt(62.0));
  set_positions(config, 32768, 10000);
  config.groups[0].rope.pairing = RopePairing::neox;
  const std::vector<double> factors = {
      1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725,
      2.093982484148734,  3.1446935121267696, 4.937952647693647,  7.524541999994549,
      10.475458000005451, 13.062047352306353, 14.85530648787323,  15.906017515851266,
      16.461961959767827, 16.740306425132907, 16.87581087164081,  16.940876586213285};
  config.groups[0].rope.scaling = LongRopeScaling{.short_factor = factors,
                                                  .long_factor = factors,
                                                  .original_max_position = 32768,
                                                  .max_position = 32768};
  return config;
}

ModelConfig glm_4_7_flash() {
  ModelConfig config = base("glm4_moe_lite", 47,
                            {.hidden_size = 2048,
                             .num_heads = 20,
                             .q_lora_rank = 768,
                             .kv_lora_rank = 512,
                             .qk_nope_head_dim = 192,
                             .qk_rope_head_dim = 64,
                             .v_head_dim = 256});
  config.vocab_size = 154880;
  config.rms_norm_eps = 1e-5f;
  set_positions(config, 202752, 1000000);
  return config;
}

PresetInfo preset(std::string_view name, ModelConfig config) {
  config.mla = config.mla.validated();
  return {name, std::move(config)};
}

}  // namespace

const std::vector<PresetInfo>& model_presets() {
  static const std::vector<PresetInfo> presets = [] {
    std::vector<PresetInfo> all = {
        preset("deepseek-v2", deepseek_v2()), preset("deepseek-v2-lite", deepseek_v2_lite()),
        preset("deepseek-v3", deepseek_v3()), preset("kimi-k2", kimi_k2()),
        preset("minicpm3-4b", minicpm3_4b()), preset("glm-4.7-flash", glm_4_7_flash()),
    };
    for (PresetInfo& of_gqa : gqa_presets()) all.push_back(std::move(of_gqa));
    return all;
  }();
  return presets;
}

}  // namespace fovea
