#include "fovea/model.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "fovea/thread_pool.h"
#include "model/checkpoint.h"
#include "model/layer_tensors.h"
#include "model/mapped_file.h"
#include "model/seeded_weights.h"

namespace fovea {

struct Model::State {
  ModelConfig config;
  DType dtype = DType::bf16;
  /// Owns the mappings that weights may view. Absent for a preset.
  std::unique_ptr<Checkpoint> checkpoint;
  std::vector<LayerMemory> memory;
  std::vector<DecoderLayer> layers;

  const LayerTensors& tensors(std::int64_t index, bool of_mla) const;
};

namespace {

/// A cos/sin table of this size is made without asking; a longer one only for who names its length,
/// as max_position_embeddings is a file's claim.
constexpr std::int64_t kMaxUnaskedTableBytes = std::int64_t{1} << 30;

/// Makes the table of the positions that will be served, and lets the config say so.
std::shared_ptr<const RotaryEmbedding> make_rotary(RopeConfig& rope, std::int64_t max_position,
                                                   const MemorySource& memory) {
  if (max_position > 0) {
    rope.max_position = max_position;
  } else {
    FOVEA_CHECK(bytes_of(DType::f32, rope.max_position) * rope.dim <= kMaxUnaskedTableBytes,
                unsupported,
                "max_position_embeddings is {}: its cos/sin table takes over a gigabyte; set "
                "Model::Options::max_position to the positions that will be served",
                rope.max_position);
  }
  return std::make_shared<const RotaryEmbedding>(rope, memory);
}

const PresetInfo* find_preset(const std::string& name) {
  const std::vector<PresetInfo>& presets = model_presets();
  const auto at = std::find_if(presets.begin(), presets.end(),
                               [&](const PresetInfo& preset) { return preset.name == name; });
  return at == presets.end() ? nullptr : &*at;
}

[[noreturn]] void refuse_name(const std::string& name) {
  std::string known;
  for (const PresetInfo& preset : model_presets()) {
    known += (known.empty() ? "" : ", ") + std::string(preset.name);
  }
  fail(ErrorCode::invalid_argument,
       "model {} is neither a directory with a config.json nor one of {}", name, known);
}

/// What the first layer's matrices are stored in, or config.json's word where they are FP8.
DType checkpoint_dtype(const ModelConfig& config, const LayerTensors& tensors) {
  const DType stored = config.is_mla() ? tensors.mla.kv_b_proj.dtype : tensors.gqa.o_proj.dtype;
  return is_compute_dtype(stored) ? stored : config.dtype;
}

std::int64_t layer_count(const ModelConfig& config, std::int64_t asked,
                         std::int64_t default_count) {
  const std::int64_t count = asked == -1 ? default_count : asked;
  FOVEA_CHECK(count >= 1 && count <= config.num_layers, invalid_argument,
              "num_layers is {}, but must be -1 or in [1, {}]", asked, config.num_layers);
  return count;
}

/// Groups come in the order of their first layers: those of the first layers are the first groups.
void keep_groups_of(ModelConfig& config, std::int64_t num_layers) {
  config.layer_group.resize(static_cast<std::size_t>(num_layers));
  const auto last = std::max_element(config.layer_group.begin(), config.layer_group.end());
  config.groups.resize(static_cast<std::size_t>(*last) + 1);
}

/// One table for each KV group; none where nothing turns.
using Rotaries = std::vector<std::shared_ptr<const RotaryEmbedding>>;

Rotaries make_rotaries(ModelConfig& config, const Model::Options& options) {
  Rotaries rotaries;
  for (KvGroupConfig& group : config.groups) {
    rotaries.push_back(group.rope.dim > 0
                           ? make_rotary(group.rope, options.max_position, options.memory)
                           : nullptr);
  }
  return rotaries;
}

DecoderLayer make_layer(const ModelConfig& config, std::size_t index, const LayerTensors& tensors,
                        const Rotaries& rotaries, const Model::Options& options) {
  const std::int32_t group = config.layer_group[index];
  const auto& rotary = rotaries[static_cast<std::size_t>(group)];
  auto attention = [&]() -> std::variant<MlaLayer, AttentionLayer> {
    if (config.is_mla()) {
      return MlaLayer(config.mla, tensors.mla, rotary,
                      {.absorption = options.absorption,
                       .rms_norm_eps = config.latent_norm_eps,
                       .linear = options.linear,
                       .dtype = options.dtype,
                       .requantize_absorbed = options.requantize_absorbed,
                       .q_scale = options.q_scale,
                       .absorbed_products = options.absorbed_products,
                       .memory = options.memory});
    }
    return AttentionLayer(config.gqa, tensors.gqa, rotary,
                          {.qk_norm = config.qk_norm,
                           .rms_norm_eps = config.rms_norm_eps,
                           .linear = options.linear,
                           .dtype = options.dtype,
                           .memory = options.memory});
  };
  return {Tensor::copy_of(tensors.input_layernorm, options.memory), attention(),
          Tensor::copy_of(tensors.post_attention_layernorm, options.memory), group};
}

}  // namespace

Model::Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;
Model::~Model() = default;

Model Model::load(const std::string& name_or_directory, const Options& options) {
  FOVEA_CHECK(is_compute_dtype(options.dtype), invalid_argument,
              "dtype is {}, but must be f32, f16 or bf16", name_of(options.dtype));
  FOVEA_CHECK(options.max_position >= 0, invalid_argument,
              "max_position is {}, but must not be negative", options.max_position);
  Model model;
  model.state_ = std::make_unique<State>();
  State& state = *model.state_;
  state.dtype = options.dtype;

  std::int64_t num_layers = 0;
  if (const PresetInfo* preset = find_preset(name_or_directory)) {
    state.config = preset->config;
    num_layers = layer_count(state.config, options.num_layers, 1);
  } else {
    const std::string config_path = name_or_directory + "/config.json";
    if (!file_exists(config_path)) refuse_name(name_or_directory);
    const MappedFile config_file(config_path);
    state.config = parse_model_config(std::string(config_file.text()), config_path);
    state.checkpoint = std::make_unique<Checkpoint>(name_or_directory);
    num_layers = layer_count(state.config, options.num_layers, state.config.num_layers);
  }

  const std::unique_ptr<ThreadPool> pool = make_std_thread_pool();
  for (std::int64_t i = 0; i < num_layers; ++i) {
    if (state.checkpoint) {
      const LayerTensors tensors = read_layer(*state.checkpoint, state.config, i);
      if (i == 0) state.config.dtype = checkpoint_dtype(state.config, tensors);
      const NormWeights norms =
          state.config.norm_weights_minus_one ? NormWeights::plus_one : NormWeights::as_stored;
      state.memory.push_back(convert_layer(tensors, options.dtype, norms, *pool));
    } else {
      state.memory.push_back(seeded_layer(state.config, options.seed, i, options.dtype, *pool));
    }
  }

  keep_groups_of(state.config, num_layers);
  const Rotaries rotaries = make_rotaries(state.config, options);
  for (std::size_t i = 0; i < state.memory.size(); ++i) {
    state.layers.push_back(make_layer(state.config, i, state.memory[i].tensors, rotaries, options));
  }
  return model;
}

const ModelConfig& Model::config() const { return state_->config; }
DType Model::dtype() const { return state_->dtype; }

std::int64_t Model::num_layers() const { return static_cast<std::int64_t>(state_->layers.size()); }

const DecoderLayer& Model::layer(std::int64_t index) const {
  FOVEA_CHECK(index >= 0 && index < num_layers(), invalid_argument,
              "layer is {}, but must be in [0, {})", index, num_layers());
  return state_->layers[static_cast<std::size_t>(index)];
}

const LayerTensors& Model::State::tensors(std::int64_t index, bool of_mla) const {
  const auto count = static_cast<std::int64_t>(memory.size());
  FOVEA_CHECK(index >= 0 && index < count, invalid_argument, "layer is {}, but must be in [0, {})",
              index, count);
  FOVEA_CHECK(config.is_mla() == of_mla, invalid_argument,
              "weights of {} attention are asked, but {} has {} attention",
              of_mla ? "latent" : "grouped-query", config.model_type,
              of_mla ? "grouped-query" : "latent");
  return memory[static_cast<std::size_t>(index)].tensors;
}

const MlaWeights& Model::mla_weights(std::int64_t index) const {
  return state_->tensors(index, true).mla;
}

const AttentionWeights& Model::gqa_weights(std::int64_t index) const {
  return state_->tensors(index, false).gqa;
}

const TensorView& Model::input_layernorm(std::int64_t index) const {
  return state_->tensors(index, state_->config.is_mla()).input_layernorm;
}

KvScalePair Model::kv_scales(std::int64_t index) const {
  return state_->tensors(index, state_->config.is_mla()).kv_scales;
}

std::int64_t Model::weight_bytes() const {
  std::int64_t bytes = 0;
  for (const DecoderLayer& layer : state_->layers) {
    bytes +=
        layer.input_layernorm.nbytes() + layer.post_attention_layernorm.nbytes() +
        std::visit([](const auto& attention) { return attention.weight_bytes(); }, layer.attention);
  }
  return bytes;
}

}  // namespace fovea
