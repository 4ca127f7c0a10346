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
};

namespace {

/// A cos/sin table of this size is made without asking; a longer one only for who names its length,
/// as max_position_embeddings is a file's claim.
constexpr std::int64_t kMaxUnaskedTableBytes = std::int64_t{1} << 30;

/// Makes the table of the positions that will be served, and lets the config say so.
std::shared_ptr<const RotaryEmbedding> make_rotary(RopeConfig& rope, std::int64_t max_position) {
  if (max_position > 0) {
    rope.max_position = max_position;
  } else {
    FOVEA_CHECK(bytes_of(DType::f32, rope.max_position) * rope.dim <= kMaxUnaskedTableBytes,
                unsupported,
                "max_position_embeddings is {}: its cos/sin table takes over a gigabyte; set "
                "Model::Options::max_position to the positions that will be served",
                rope.max_position);
  }
  return std::make_shared<const RotaryEmbedding>(rope);
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

std::int64_t layer_count(const ModelConfig& config, std::int64_t asked,
                         std::int64_t default_count) {
  const std::int64_t count = asked == -1 ? default_count : asked;
  FOVEA_CHECK(count >= 1 && count <= config.num_layers, invalid_argument,
              "num_layers is {}, but must be -1 or in [1, {}]", asked, config.num_layers);
  return count;
}

DecoderLayer make_layer(const ModelConfig& config, const LayerTensors& tensors,
                        const std::shared_ptr<const RotaryEmbedding>& rotary,
                        const MlaOptions& options) {
  Tensor norm = Tensor::empty(tensors.input_layernorm.dtype, {config.dims.hidden_size});
  copy(tensors.input_layernorm, norm.view());
  return {std::move(norm), MlaLayer(config.dims, tensors.attention, rotary, options)};
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
      if (i == 0) state.config.dtype = tensors.attention.kv_b_proj.dtype;
      state.memory.push_back(convert_layer(tensors, options.dtype, *pool));
    } else {
      state.memory.push_back(seeded_layer(state.config, options.seed, i, options.dtype, *pool));
    }
  }

  const auto rotary = make_rotary(state.config.rope, options.max_position);
  MlaOptions layer_options;
  layer_options.absorption = options.absorption;
  layer_options.rms_norm_eps = state.config.latent_norm_eps;
  layer_options.linear = options.linear;
  for (const LayerMemory& memory : state.memory) {
    state.layers.push_back(make_layer(state.config, memory.tensors, rotary, layer_options));
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

const MlaWeights& Model::weights(std::int64_t index) const {
  FOVEA_CHECK(index >= 0 && index < num_layers(), invalid_argument,
              "layer is {}, but must be in [0, {})", index, num_layers());
  return state_->memory[static_cast<std::size_t>(index)].tensors.attention;
}

std::int64_t Model::weight_bytes() const {
  std::int64_t bytes = 0;
  for (const DecoderLayer& layer : state_->layers) {
    bytes += layer.input_layernorm.nbytes() + layer.attention.weight_bytes();
  }
  return bytes;
}

}  // namespace fovea
