#include "support/tiny_model.h"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/random.h"
#include "model/checkpoint_files.h"

namespace fovea::test {
namespace {

struct Dims {
  explicit Dims(const TinyModelOptions& options)
      : N(3 * options.width),
        H(48 * options.width),
        Lq(20 * options.width),
        L(options.has_full_rows ? 512 : 24 * options.width),
        P(12 * options.width),
        R(options.has_full_rows ? 64 : 8 * options.width),
        V(10 * options.width) {}
  std::int64_t N, H, Lq, L, P, R, V;
};

/// Normal values around `mean`, [rows, columns] or [columns].
FileTensor normal_tensor(std::uint64_t key, std::vector<std::int64_t> shape, double mean,
                         double deviation) {
  FileTensor tensor{"F32", std::move(shape), {}};
  std::int64_t count = 1;
  for (const std::int64_t extent : tensor.shape) count *= extent;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t bits =
        engine::draw(key, engine::Stream::hidden, static_cast<std::uint64_t>(i));
    const auto value = static_cast<float>(mean + deviation * engine::to_normal(bits));
    tensor.bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  return tensor;
}

json config_json(const TinyModelOptions& options) {
  const Dims d(options);
  json config = tiny_config();
  config["num_hidden_layers"] = options.num_layers;
  config["hidden_size"] = d.H;
  config["num_attention_heads"] = d.N;
  config["num_key_value_heads"] = d.N;
  config["q_lora_rank"] = d.Lq;
  config["kv_lora_rank"] = d.L;
  config["qk_nope_head_dim"] = d.P;
  config["qk_rope_head_dim"] = d.R;
  config["v_head_dim"] = d.V;
  config["max_position_embeddings"] = options.max_position;
  config["vocab_size"] = 1000;
  if (options.scale_depth > 0) {
    config["model_type"] = "minicpm3";
    config["scale_depth"] = options.scale_depth;
    config.erase("rope_scaling");
  }
  return config;
}

}  // namespace

void write_tiny_model(const std::string& directory, const TinyModelOptions& options) {
  const Dims d(options);
  FileTensors tensors;
  std::uint64_t key = options.seed << 32;
  const auto norm = [&](std::int64_t extent) { return normal_tensor(++key, {extent}, 1, 0.2); };
  const auto matrix = [&](std::int64_t out, std::int64_t in, double gain = 1) {
    return normal_tensor(++key, {out, in}, 0, gain / std::sqrt(static_cast<double>(in)));
  };
  for (std::int64_t layer = 0; layer < options.num_layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const std::string attention = prefix + "self_attn.";
    tensors[prefix + "input_layernorm.weight"] = norm(d.H);
    tensors[attention + "q_a_proj.weight"] = matrix(d.Lq, d.H);
    tensors[attention + "q_a_layernorm.weight"] = norm(d.Lq);
    tensors[attention + "q_b_proj.weight"] = matrix(d.N * (d.P + d.R), d.Lq, options.logit_spread);
    tensors[attention + "kv_a_proj_with_mqa.weight"] = matrix(d.L + d.R, d.H);
    tensors[attention + "kv_a_layernorm.weight"] = norm(d.L);
    tensors[attention + "kv_b_proj.weight"] = matrix(d.N * (d.P + d.V), d.L);
    tensors[attention + "o_proj.weight"] = matrix(d.H, d.N * d.V);
  }
  std::ofstream(directory + "/config.json") << config_json(options).dump();
  std::ofstream(directory + "/model.safetensors", std::ios::binary) << safetensors_bytes(tensors);
}

Model make_tiny_model(const TinyModelOptions& options) {
  const TempDir directory;
  write_tiny_model(directory.path(), options);
  return Model::load(directory.path(), {.num_layers = options.num_layers, .dtype = options.dtype});
}

namespace {

json gqa_config_json(const TinyGqaOptions& options) {
  json config = {{"model_type", options.family},
                 {"hidden_size", 48 * options.width},
                 {"num_attention_heads", 4 * options.width},
                 {"num_key_value_heads", 2 * options.width},
                 {"head_dim", 16 * options.width},
                 {"num_hidden_layers", options.num_layers},
                 {"max_position_embeddings", options.max_position},
                 {"rms_norm_eps", 1e-5},
                 {"vocab_size", 1000},
                 {"sliding_window", options.sliding_window},
                 {"rope_theta", 10000}};
  for (std::int64_t i = 0; i < options.num_layers; ++i) {
    config["layer_types"].push_back(i % 2 == 0 ? "sliding_attention" : "full_attention");
  }
  if (options.family == "gpt_oss") {
    config["rope_scaling"] = {{"rope_type", "yarn"},
                              {"factor", 8.0},
                              {"original_max_position_embeddings", 64},
                              {"truncate", false}};
  } else {
    config["attn_logit_softcapping"] = 20.0;
    config["query_pre_attn_scalar"] = 20 * options.width;
    config["rope_local_base_freq"] = 1000;
  }
  return config;
}

}  // namespace

void write_tiny_gqa_model(const std::string& directory, const TinyGqaOptions& options) {
  const std::int64_t H = 48 * options.width, D = 16 * options.width;
  const std::int64_t q = 4 * options.width * D, kv = 2 * options.width * D;
  const bool is_gemma = options.family == "gemma3_text";
  FileTensors tensors;
  std::uint64_t key = options.seed << 32;
  // Gemma stores norm weights less 1.
  const auto norm = [&](std::int64_t extent, double mean = 1) {
    return normal_tensor(++key, {extent}, is_gemma ? mean - 1 : mean, 0.2);
  };
  const auto matrix = [&](std::int64_t out, std::int64_t in, double gain = 1) {
    return normal_tensor(++key, {out, in}, 0, gain / std::sqrt(static_cast<double>(in)));
  };
  const auto bias = [&](std::int64_t extent) { return normal_tensor(++key, {extent}, 0, 0.3); };
  for (std::int64_t layer = 0; layer < options.num_layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const std::string attention = prefix + "self_attn.";
    tensors[prefix + "input_layernorm.weight"] = norm(H);
    tensors[attention + "q_proj.weight"] = matrix(q, H, is_gemma ? 1 : options.logit_spread);
    tensors[attention + "k_proj.weight"] = matrix(kv, H);
    tensors[attention + "v_proj.weight"] = matrix(kv, H);
    tensors[attention + "o_proj.weight"] = matrix(H, q);
    if (is_gemma) {
      tensors[prefix + "post_attention_layernorm.weight"] = norm(H);
      tensors[attention + "q_norm.weight"] = norm(D, options.logit_spread);
      tensors[attention + "k_norm.weight"] = norm(D);
    } else {
      tensors[attention + "q_proj.bias"] = bias(q);
      tensors[attention + "k_proj.bias"] = bias(kv);
      tensors[attention + "v_proj.bias"] = bias(kv);
      tensors[attention + "o_proj.bias"] = bias(H);
      tensors[attention + "sinks"] =
          normal_tensor(++key, {4 * options.width}, options.logit_spread, 1);
    }
  }
  std::ofstream(directory + "/config.json") << gqa_config_json(options).dump();
  std::ofstream(directory + "/model.safetensors", std::ios::binary) << safetensors_bytes(tensors);
}

Model make_tiny_gqa_model(const TinyGqaOptions& options) {
  const TempDir directory;
  write_tiny_gqa_model(directory.path(), options);
  return Model::load(directory.path(), {.num_layers = options.num_layers, .dtype = options.dtype});
}

}  // namespace fovea::test
