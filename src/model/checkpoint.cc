#include "model/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>

#include "core/check.h"
#include "model/json_events.h"
#include "model/shard_index.h"

namespace fovea {

namespace {

/// "[576, 2048]", cut after a few extents: a hostile header may list thousands.
std::string shape_text(std::span<const std::int64_t> shape) {
  constexpr std::size_t kMost = 8;
  std::string text;
  for (const std::int64_t extent : shape.first(std::min(shape.size(), kMost))) {
    text += (text.empty() ? "" : ", ") + std::to_string(extent);
  }
  return "[" + text + (shape.size() > kMost ? ", ...]" : "]");
}

}  // namespace

Checkpoint::Checkpoint(const std::string& directory) : directory_(directory) {
  const std::string single = "model.safetensors";
  const std::string index_path = directory_ + "/model.safetensors.index.json";
  if (file_exists(directory_ + "/" + single)) {
    const SafetensorsFile& file = open(single);
    listing_path_ = file.path();
    for (const SafetensorsEntry& entry : file.entries()) locations_.push_back({entry.name, single});
    return;
  }
  FOVEA_CHECK(file_exists(index_path), corrupt_file,
              "{}: has neither model.safetensors nor model.safetensors.index.json", directory_);
  const MappedFile index(index_path);
  listing_path_ = index_path;
  for (auto& [name, file] : read_shard_index(index.text(), index_path)) {
    locations_.push_back({std::move(name), std::move(file)});
  }
}

const SafetensorsFile& Checkpoint::open(const std::string& file) {
  std::unique_ptr<SafetensorsFile>& slot = files_[file];
  if (!slot) slot = std::make_unique<SafetensorsFile>(directory_ + "/" + file);
  return *slot;
}

std::vector<Checkpoint::Location>::const_iterator Checkpoint::lower_bound(
    std::string_view name) const {
  return std::lower_bound(
      locations_.begin(), locations_.end(), name,
      [](const Location& location, std::string_view key) { return location.name < key; });
}

bool Checkpoint::has(std::string_view name) const {
  const auto at = lower_bound(name);
  return at != locations_.end() && at->name == name;
}

std::vector<std::string_view> Checkpoint::names_below(std::string_view prefix) const {
  std::vector<std::string_view> names;
  for (auto at = lower_bound(prefix); at != locations_.end() && at->name.starts_with(prefix);
       ++at) {
    names.push_back(at->name);
  }
  return names;
}

std::pair<const SafetensorsFile&, const SafetensorsEntry&> Checkpoint::entry(
    const std::string& name) {
  const auto at = lower_bound(name);
  FOVEA_CHECK(at != locations_.end() && at->name == name, corrupt_file, "{}: has no tensor {}",
              listing_path_, printable(name));
  const SafetensorsFile& file = open(at->file);
  const SafetensorsEntry* entry = file.find(name);
  FOVEA_CHECK(entry != nullptr, corrupt_file, "{}: has no tensor {}, though {} says so",
              file.path(), printable(name), listing_path_);
  return {file, *entry};
}

TensorView Checkpoint::tensor(const std::string& name, std::initializer_list<std::int64_t> shape) {
  const auto [file, entry] = this->entry(name);
  FOVEA_CHECK(std::equal(shape.begin(), shape.end(), entry.shape.begin(), entry.shape.end()),
              corrupt_file, "{}: tensor {} has the shape {}, but config.json makes it {}",
              file.path(), printable(name), shape_text(entry.shape),
              shape_text({shape.begin(), shape.size()}));
  return file.view(entry);
}

TensorView Checkpoint::one_element(const std::string& name) {
  const auto [file, entry] = this->entry(name);
  FOVEA_CHECK(entry.shape.empty() || (entry.shape.size() == 1 && entry.shape[0] == 1), corrupt_file,
              "{}: tensor {} has the shape {}, but config.json makes it [1] or []", file.path(),
              printable(name), shape_text(entry.shape));
  const TensorView view = file.view(entry);
  return TensorView::contiguous(view.data, view.dtype, {1, 1});
}

float Checkpoint::number(const std::string& name) {
  const auto at = lower_bound(name);
  const SafetensorsFile& file = open(at->file);
  const SafetensorsEntry* entry = file.find(name);
  float value = std::numeric_limits<float>::quiet_NaN();
  if (entry == nullptr) return value;
  const TensorView view = file.view(*entry);
  const bool is_number =
      is_compute_dtype(view.dtype) && std::all_of(entry->shape.begin(), entry->shape.end(),
                                                  [](std::int64_t extent) { return extent == 1; });
  if (!is_number) return value;
  // The file may have it at any address.
  alignas(float) std::byte element[sizeof(float)];
  std::memcpy(element, view.data, static_cast<std::size_t>(bytes_of(view.dtype, 1)));
  copy(TensorView::contiguous(element, view.dtype, {1}), TensorView::of(&value, {1}));
  return value;
}

namespace {

/// Scales of a quantised KV cache. A cache of a compute dtype has none, whatever the checkpoint
/// says.
constexpr std::string_view kKeyScale = ".k_scale", kValueScale = ".v_scale",
                           kSharedScale = ".kv_scale";
bool is_cache_scale(std::string_view name) {
  return name.ends_with(kKeyScale) || name.ends_with(kValueScale) || name.ends_with(kSharedScale);
}

/// Reads one layer's tensors and remembers which it read.
class LayerReader {
 public:
  LayerReader(Checkpoint& checkpoint, std::string prefix, const WeightQuantization& quantization)
      : checkpoint_(checkpoint), prefix_(std::move(prefix)), quantization_(quantization) {}

  TensorView operator()(std::string_view suffix, std::initializer_list<std::int64_t> shape) {
    const std::string name = prefix_ + std::string(suffix);
    const TensorView view = read(name, shape);
    check_dense(name, view);
    return view;
  }

  /// `stem`.weight [out, in] and, where it is FP8, its scale.
  TensorView projection(std::string_view stem, std::int64_t out, std::int64_t in,
                        WeightScale& scale) {
    const std::string name = prefix_ + std::string(stem) + ".weight";
    const TensorView weight = read(name, {out, in});
    if (weight.dtype != DType::f8e4m3fn) return weight;
    FOVEA_CHECK(quantization_.method != WeightQuantMethod::none, unsupported,
                "{}: tensor {} is F8_E4M3, but config.json has no quantization_config that says "
                "how it is scaled",
                checkpoint_.listing_path(), printable(name));
    scale.groups = quantization_.weights;
    const auto [rows, columns] = scale.groups;
    const bool of_blocks = quantization_.method == WeightQuantMethod::fp8 && rows > 0;
    const std::string scale_name = name + (of_blocks ? "_scale_inv" : "_scale");
    if (rows == 0) {
      read_.push_back(scale_name);
      scale.scale = checkpoint_.one_element(scale_name);
    } else {
      const std::int64_t width = columns > 0 ? columns : in;
      scale.scale = read(scale_name, {(out + rows - 1) / rows, (in + width - 1) / width});
    }
    check_dense(scale_name, scale.scale);
    return weight;
  }

  /// 1 where the checkpoint has none. NaN, which a format refuses, where it has something else than
  /// one number.
  KvScalePair cache_scales() const {
    KvScalePair scales;
    for (const std::string_view name : checkpoint_.names_below(prefix_ + "self_attn.")) {
      if (!is_cache_scale(name)) continue;
      const float scale = checkpoint_.number(std::string(name));
      if (!name.ends_with(kValueScale)) scales.k_scale = scale;
      if (!name.ends_with(kKeyScale)) scales.v_scale = scale;
    }
    return scales;
  }

  /// What the model's formula does not hold must not go unnoticed.
  void refuse_unread(std::string_view group) const {
    for (const std::string_view name : checkpoint_.names_below(prefix_ + std::string(group))) {
      if (std::find(read_.begin(), read_.end(), name) != read_.end()) continue;
      // Frequencies that old checkpoints stored; config.json gives the same.
      if (name.ends_with(".rotary_emb.inv_freq") || is_cache_scale(name)) continue;
      // Of products in FP8; activations are not quantised here.
      const bool quantized = quantization_.method != WeightQuantMethod::none;
      if (quantized && name.ends_with(".input_scale")) continue;
      const bool scale = name.find("scale") != std::string_view::npos;
      FOVEA_CHECK(!scale, unsupported,
                  "{}: tensor {} belongs to a quantised weight, but the weight is not, or not as "
                  "config.json says",
                  checkpoint_.listing_path(), printable(name));
      fail(ErrorCode::unsupported,
           "{}: tensor {} has no place in the attention that config.json describes",
           checkpoint_.listing_path(), printable(name));
    }
  }

 private:
  TensorView read(const std::string& name, std::initializer_list<std::int64_t> shape) {
    if (!checkpoint_.has(name)) refuse_quantised(name);
    read_.push_back(name);
    return checkpoint_.tensor(name, shape);
  }

  void check_dense(const std::string& name, const TensorView& view) const {
    FOVEA_CHECK(is_compute_dtype(view.dtype), unsupported,
                "{}: tensor {} is F8_E4M3, but must be F32, F16 or BF16",
                checkpoint_.listing_path(), printable(name));
  }

  /// A `weight` that is missing because something else stands for it deserves that reason.
  void refuse_quantised(const std::string& name) const {
    constexpr std::string_view kWeight = ".weight";
    if (!name.ends_with(kWeight)) return;
    const std::string stem = name.substr(0, name.size() - kWeight.size());
    for (const char* other : {".qweight", ".weight_packed", ".weight_scale_inv", ".weight_scale"}) {
      FOVEA_CHECK(!checkpoint_.has(stem + other), unsupported,
                  "{}: instead of {} there is {}: quantised weights are read from F8_E4M3 alone",
                  checkpoint_.listing_path(), printable(name), printable(stem + other));
    }
  }

  Checkpoint& checkpoint_;
  std::string prefix_;
  const WeightQuantization& quantization_;
  std::vector<std::string> read_;
};

/// "model.layers.3.", or what stands for it where the checkpoint is of the model without its head,
/// or of one with vision around the language model.
std::string layer_prefix(const Checkpoint& checkpoint, std::int64_t layer) {
  const std::string of_layer = "layers." + std::to_string(layer) + ".";
  for (const char* model : {"", "language_model.model.", "model.language_model."}) {
    if (checkpoint.has(model + of_layer + "input_layernorm.weight")) return model + of_layer;
  }
  return "model." + of_layer;
}

MlaWeights read_mla(LayerReader& read, const ModelConfig& config) {
  const MlaDims& d = config.mla;
  const std::int64_t q_width = d.num_heads * d.qk_head_dim();
  MlaWeights w;
  if (d.q_lora_rank > 0) {
    w.q_a_proj =
        read.projection("self_attn.q_a_proj", d.q_lora_rank, d.hidden_size, w.q_a_proj_scale);
    w.q_a_layernorm = read("self_attn.q_a_layernorm.weight", {d.q_lora_rank});
    w.q_b_proj = read.projection("self_attn.q_b_proj", q_width, d.q_lora_rank, w.q_b_proj_scale);
    if (config.attention_bias) w.q_a_bias = read("self_attn.q_a_proj.bias", {d.q_lora_rank});
  } else {
    w.q_b_proj = read.projection("self_attn.q_proj", q_width, d.hidden_size, w.q_b_proj_scale);
  }
  w.kv_a_proj = read.projection("self_attn.kv_a_proj_with_mqa", d.latent_dim(), d.hidden_size,
                                w.kv_a_proj_scale);
  w.kv_a_layernorm = read("self_attn.kv_a_layernorm.weight", {d.kv_lora_rank});
  w.kv_b_proj =
      read.projection("self_attn.kv_b_proj", d.num_heads * (d.qk_nope_head_dim + d.v_head_dim),
                      d.kv_lora_rank, w.kv_b_proj_scale);
  w.o_proj = read.projection("self_attn.o_proj", d.hidden_size, d.num_heads * d.v_head_dim,
                             w.o_proj_scale);
  if (config.attention_bias) {
    w.kv_a_bias = read("self_attn.kv_a_proj_with_mqa.bias", {d.latent_dim()});
  }
  if (config.o_bias) w.o_bias = read("self_attn.o_proj.bias", {d.hidden_size});
  return w;
}

AttentionWeights read_gqa(LayerReader& read, const ModelConfig& config) {
  const GqaDims& d = config.gqa;
  AttentionWeights w;
  w.q_proj = read.projection("self_attn.q_proj", d.q_size(), d.hidden_size, w.q_proj_scale);
  w.k_proj = read.projection("self_attn.k_proj", d.k_size(), d.hidden_size, w.k_proj_scale);
  w.v_proj = read.projection("self_attn.v_proj", d.v_size(), d.hidden_size, w.v_proj_scale);
  w.o_proj = read.projection("self_attn.o_proj", d.hidden_size, d.out_size(), w.o_proj_scale);
  if (config.attention_bias) {
    w.q_bias = read("self_attn.q_proj.bias", {d.q_size()});
    w.k_bias = read("self_attn.k_proj.bias", {d.k_size()});
    w.v_bias = read("self_attn.v_proj.bias", {d.v_size()});
  }
  if (config.o_bias) w.o_bias = read("self_attn.o_proj.bias", {d.hidden_size});
  if (config.qk_norm != QkNorm::none) {
    w.q_norm = read("self_attn.q_norm.weight", {d.head_dim});
    w.k_norm = read("self_attn.k_norm.weight", {d.head_dim});
  }
  if (config.sinks) w.sinks = read("self_attn.sinks", {d.num_heads});
  return w;
}

}  // namespace

LayerTensors read_layer(Checkpoint& checkpoint, const ModelConfig& config, std::int64_t layer) {
  LayerReader read(checkpoint, layer_prefix(checkpoint, layer), config.quantization);
  LayerTensors result;
  result.input_layernorm = read("input_layernorm.weight", {config.hidden_size});
  if (config.post_attention_norm) {
    result.post_attention_layernorm = read("post_attention_layernorm.weight", {config.hidden_size});
  }
  if (config.is_mla()) {
    result.mla = read_mla(read, config);
  } else {
    result.gqa = read_gqa(read, config);
  }
  result.kv_scales = read.cache_scales();
  read.refuse_unread("self_attn.");
  return result;
}

}  // namespace fovea
