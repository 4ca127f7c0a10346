// Checkpoints with FP8 projections in each published form, and their values for the oracle.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "fovea/linear.h"
#include "fovea/oracle.h"
#include "model/checkpoint_files.h"

namespace fovea::test {

/// A published form: its quantization_config, and the groups that it means.
struct Fp8Form {
  const char* name;
  json config;
  const char* scale_suffix;
  WeightGroups weights;
  WeightGroups activations;
  bool scalar = false;  ///< A scale per tensor has no dimension, else one of 1.
  friend void PrintTo(const Fp8Form& form, std::ostream* out) { *out << form.name; }
};

inline json compressed_tensors_config(const char* strategy) {
  return {{"quant_method", "compressed-tensors"},
          {"format", "float-quantized"},
          {"quantization_status", "compressed"},
          {"ignore", {"lm_head"}},
          {"kv_cache_scheme", {{"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}}},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"input_activations",
               {{"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"dynamic", true}}},
              {"output_activations", nullptr},
              {"weights",
               {{"num_bits", 8},
                {"type", "float"},
                {"strategy", strategy},
                {"symmetric", true},
                {"dynamic", false},
                {"group_size", nullptr}}}}}}}};
}

inline std::vector<Fp8Form> fp8_forms() {
  const json deepseek = {{"quant_method", "fp8"},
                         {"fmt", "e4m3"},
                         {"activation_scheme", "dynamic"},
                         {"weight_block_size", {128, 128}}};
  json tall = deepseek;
  tall["weight_block_size"] = {64, 128};
  const json tensor = {{"quant_method", "fp8"}, {"activation_scheme", "static"}};
  json block = compressed_tensors_config("block");
  block["config_groups"]["group_0"]["weights"]["block_structure"] = {128, 128};
  block["config_groups"]["group_0"]["input_activations"]["strategy"] = "group";
  block["config_groups"]["group_0"]["input_activations"]["group_size"] = 128;
  return {{"deepseek_v3", deepseek, "_scale_inv", {128, 128}, {1, 128}},
          {"blocks_of_64_by_128", tall, "_scale_inv", {64, 128}, {1, 128}},
          {"fp8_tensor", tensor, "_scale", {0, 0}, {0, 0}, true},
          {"compressed_tensor", compressed_tensors_config("tensor"), "_scale", {0, 0}, {1, 0}},
          {"compressed_channel", compressed_tensors_config("channel"), "_scale", {1, 0}, {1, 0}},
          {"compressed_block", block, "_scale", {128, 128}, {1, 128}}};
}

inline std::uint64_t next_random() {
  static std::uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}

inline FileTensor random_floats(std::vector<std::int64_t> shape, float low, float high) {
  FileTensor tensor = float_tensor(std::move(shape));
  for (std::size_t i = 0; i < tensor.bytes.size(); i += sizeof(float)) {
    const float value = low + (high - low) * static_cast<float>(next_random()) * 0x1p-31f;
    std::memcpy(tensor.bytes.data() + i, &value, sizeof value);
  }
  return tensor;
}

/// A checkpoint in one form, and the values of its projections in float64, by their names.
class Fp8Checkpoint {
 public:
  static constexpr std::int64_t kHidden = 160;

  explicit Fp8Checkpoint(const Fp8Form& form) : form_(form) {}

  /// Codes of both signs from 2^-3 to 3.75 and scales around `spread`, no two alike.
  void add(const std::string& stem, std::int64_t out, std::int64_t in, float spread) {
    FileTensor codes{"F8_E4M3", {out, in}, {}};
    for (std::int64_t i = 0; i < out * in; ++i) {
      const std::uint64_t random = next_random();
      codes.bytes.push_back(static_cast<char>(0x20 + random % 0x28 + (random >> 20) % 2 * 0x80));
    }
    const std::int64_t rows = form_.weights.out == 0 ? out : form_.weights.out;
    const std::int64_t columns = form_.weights.in == 0 ? in : form_.weights.in;
    const std::int64_t scale_rows = (out + rows - 1) / rows;
    const std::int64_t scale_columns = (in + columns - 1) / columns;
    FileTensor scale = random_floats({scale_rows, scale_columns}, 0.5f * spread, 1.5f * spread);
    std::vector<double> decoded =
        oracle::decode(codes.bytes.data(), out * in, oracle::Format::f8e4m3fn);
    const std::vector<double> scales =
        oracle::decode(scale.bytes.data(), scale_rows * scale_columns, oracle::Format::f32);
    for (std::int64_t m = 0; m < out; ++m) {
      for (std::int64_t k = 0; k < in; ++k) {
        decoded[static_cast<std::size_t>(m * in + k)] *=
            scales[static_cast<std::size_t>(m / rows * scale_columns + k / columns)];
      }
    }
    if (form_.weights.out == 0) {
      scale.shape = form_.scalar ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{1};
    }
    const std::string name = "model.layers.0.self_attn." + stem + ".weight";
    tensors[name] = std::move(codes);
    tensors[name + form_.scale_suffix] = std::move(scale);
    tensors["model.layers.0.self_attn." + stem + ".input_scale"] = random_floats({1}, 1, 2);
    values[stem] = std::move(decoded);
  }
  void add_norm(const std::string& name, std::int64_t size) {
    tensors["model.layers.0." + name + ".weight"] = random_floats({size}, 0.5f, 1.5f);
  }
  void write(const TempDir& dir, json config) const {
    config["quantization_config"] = form_.config;
    dir.write("config.json", config.dump());
    dir.write("model.safetensors", safetensors_bytes(tensors));
  }

  FileTensors tensors;
  std::map<std::string, std::vector<double>> values;

 private:
  Fp8Form form_;
};

inline json fp8_mla_config() {
  json config = tiny_config();
  config.update({{"hidden_size", Fp8Checkpoint::kHidden},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 4},
                 {"num_hidden_layers", 1},
                 {"q_lora_rank", 136},
                 {"kv_lora_rank", 144},
                 {"qk_nope_head_dim", 32},
                 {"qk_rope_head_dim", 16},
                 {"v_head_dim", 40},
                 {"torch_dtype", "bfloat16"}});
  return config;
}

inline Fp8Checkpoint fp8_mla_checkpoint(const Fp8Form& form) {
  Fp8Checkpoint checkpoint(form);
  checkpoint.add_norm("input_layernorm", Fp8Checkpoint::kHidden);
  checkpoint.add_norm("self_attn.q_a_layernorm", 136);
  checkpoint.add_norm("self_attn.kv_a_layernorm", 144);
  checkpoint.add("q_a_proj", 136, Fp8Checkpoint::kHidden, 0.06f);
  checkpoint.add("q_b_proj", 4 * 48, 136, 0.06f);
  checkpoint.add("kv_a_proj_with_mqa", 144 + 16, Fp8Checkpoint::kHidden, 0.06f);
  checkpoint.add("kv_b_proj", 4 * (32 + 40), 144, 0.06f);
  checkpoint.add("o_proj", Fp8Checkpoint::kHidden, 4 * 40, 0.06f);
  checkpoint.tensors["model.layers.0.self_attn.k_scale"] = random_floats({1}, 1, 2);
  return checkpoint;
}

inline json fp8_gqa_config() {
  return {{"model_type", "llama"},
          {"hidden_size", Fp8Checkpoint::kHidden},
          {"num_attention_heads", 6},
          {"num_key_value_heads", 2},
          {"head_dim", 32},
          {"num_hidden_layers", 1},
          {"max_position_embeddings", 256},
          {"rms_norm_eps", 1e-6},
          {"vocab_size", 100},
          {"torch_dtype", "bfloat16"},
          {"rope_theta", 10000}};
}

inline Fp8Checkpoint fp8_gqa_checkpoint(const Fp8Form& form) {
  Fp8Checkpoint checkpoint(form);
  checkpoint.add_norm("input_layernorm", Fp8Checkpoint::kHidden);
  checkpoint.add("q_proj", 192, Fp8Checkpoint::kHidden, 0.06f);
  checkpoint.add("k_proj", 64, Fp8Checkpoint::kHidden, 0.06f);
  checkpoint.add("v_proj", 64, Fp8Checkpoint::kHidden, 0.06f);
  checkpoint.add("o_proj", Fp8Checkpoint::kHidden, 192, 0.06f);
  return checkpoint;
}

}  // namespace fovea::test
