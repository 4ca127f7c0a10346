// Models: Hugging Face directories and presets, as attention layers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "fovea/attention.h"
#include "fovea/mla.h"

namespace fovea {

/// Layers of one KV group share plan and block table: they see the same keys.
struct KvGroupConfig {
  AttentionVariant variant;
  RopeConfig rope;  ///< dim 0: nothing turns.
};

/// Who wrote a checkpoint's FP8 projections: which name their scales have.
enum class WeightQuantMethod : std::uint8_t {
  none,
  fp8,                 ///< weight_scale_inv of blocks (DeepSeek-V3), weight_scale of a tensor.
  compressed_tensors,  ///< weight_scale of a tensor, of output channels or of blocks.
};

/// FP8 projections of a checkpoint, as its quantization_config says. Those that it stores in
/// another dtype are not quantised. Only weights are: activations stay in the compute dtype.
struct WeightQuantization {
  WeightQuantMethod method = WeightQuantMethod::none;
  WeightGroups weights;
  /// Of [tokens, in_features]: how products in FP8 would quantise their input. Not used here.
  WeightGroups activations;
};

/// What attention needs to know of a config.json.
struct ModelConfig {
  /// "deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3", "glm4_moe_lite"; "gpt_oss", "llama",
  /// "qwen2", "qwen3", "mistral", "gemma3_text".
  std::string model_type;
  std::int64_t num_layers = 0;
  std::int64_t hidden_size = 0;
  MlaDims mla;  ///< Of models with latent attention; else num_heads is 0.
  GqaDims gqa;  ///< Of models with grouped-query attention; else num_heads is 0.
  /// Those with layers, at least one, in the order of their first layers.
  std::vector<KvGroupConfig> groups;
  std::vector<std::int32_t> layer_group;  ///< [num_layers] into groups; a Model's of its layers.
  float rms_norm_eps = 1e-6f;             ///< Of input_layernorm and of query and key norms.
  /// Of q_a_layernorm and kv_a_layernorm: these models never pass rms_norm_eps to them.
  float latent_norm_eps = 1e-6f;
  /// Multiplies a layer's output where it joins the residual stream (MiniCPM3's scale_depth).
  float residual_scale = 1.f;
  bool attention_bias = false;  ///< The projections of the hidden states have one, ...
  bool o_bias = false;          ///< ... and so has o_proj.
  QkNorm qk_norm = QkNorm::none;
  bool sinks = false;                ///< Each layer has one per query head.
  bool post_attention_norm = false;  ///< post_attention_layernorm comes before the residual.
  /// Stored norm weights are w - 1 (Gemma). Model holds them as w.
  bool norm_weights_minus_one = false;
  std::int64_t vocab_size = 0;
  std::int64_t max_position = 0;  ///< Of the trained model; a rope.max_position is its table's.
  DType dtype = DType::bf16;      ///< Of the checkpoint, but for FP8 projections.
  WeightQuantization quantization;

  bool is_mla() const { return mla.num_heads > 0; }
};

/// Reads config.json's text. Throws Error that names the file and the field: corrupt_file for what
/// is missing or malformed, unsupported for what would change attention and is not implemented
/// here.
ModelConfig parse_model_config(const std::string& json_text, const std::string& file_name);

/// input_layernorm, attention and residual of one decoder layer.
struct DecoderLayer {
  Tensor input_layernorm;  ///< [H]
  std::variant<MlaLayer, AttentionLayer> attention;
  Tensor post_attention_layernorm;  ///< Optional [H]: of the attention's output.
  std::int32_t kv_group = 0;        ///< Into ModelConfig::groups.
};

/// Immutable; shared freely.
class Model {
 public:
  struct Options {
    std::int64_t num_layers = -1;  ///< The first so many; -1: all of the checkpoint, 1 of a preset.
    /// Weights are converted to it, once, with rounding. FP8 projections stay as they are.
    DType dtype = DType::bf16;
    std::uint64_t seed = 0;  ///< Of a preset's weights.
    /// Positions that will be served, and so the length of the cos/sin table; 0: the config's.
    std::int64_t max_position = 0;
    MlaAbsorption absorption = MlaAbsorption::two_step;
    // As in MlaOptions.
    bool requantize_absorbed = false;
    float q_scale = 0.f;
    AbsorbedProducts absorbed_products = AbsorbedProducts::dense;
    LinearBackend linear = LinearBackend::automatic;
    /// Where the layers' weights are kept: that of the contexts which will compute. What
    /// mla_weights and gqa_weights give stays on the host.
    MemorySource memory = {};
  };
  /// A preset's name, or a directory with config.json and model.safetensors or its sharded index.
  /// Files stay mapped while the model lives where dtype equals theirs. Throws Error that names the
  /// file and the tensor or field.
  static Model load(const std::string& name_or_directory, const Options& options);

  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;
  ~Model();

  /// As loaded: sm_scale filled in, groups and layer_group of the layers that were asked for, each
  /// rope as its table is.
  const ModelConfig& config() const;
  DType dtype() const;
  std::int64_t num_layers() const;
  const DecoderLayer& layer(std::int64_t index) const;
  /// A layer's weights in dtype() or FP8, as the layer was made from them; for verification. The
  /// kind that the config says.
  const MlaWeights& mla_weights(std::int64_t index) const;
  const AttentionWeights& gqa_weights(std::int64_t index) const;
  const TensorView& input_layernorm(std::int64_t index) const;  ///< [H], of the same.
  /// Of a layer's cache in a format with one scale per tensor: the checkpoint's, or 1. NaN where it
  /// has other than one number.
  KvScalePair kv_scales(std::int64_t index) const;
  std::int64_t weight_bytes() const;

 private:
  Model();
  struct State;
  std::unique_ptr<State> state_;
};

struct PresetInfo {
  std::string_view name;
  ModelConfig config;
};
/// deepseek-v2, deepseek-v2-lite, deepseek-v3, kimi-k2, minicpm3-4b, glm-4.7-flash, gpt-oss-20b,
/// gpt-oss-120b, llama-2-7b, llama-3-8b, qwen2-7b, qwen3-8b, mistral-7b, gemma-3-4b.
const std::vector<PresetInfo>& model_presets();

/// The hidden state that a token id enters the first layer with, in place of an embedding: about
/// standard normal, a function of its arguments alone. Fills `out` [H] of a compute dtype.
void token_hidden_state(std::uint64_t seed, std::int64_t token_id, const TensorView& out);

}  // namespace fovea
