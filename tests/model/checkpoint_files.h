// Small checkpoint directories for tests: right ones, to be broken one field at a time.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fovea/dtype.h"
#include "fovea/error.h"

namespace fovea::test {

using nlohmann::json;

/// A directory of its own, removed at the end.
class TempDir {
 public:
  TempDir() {
    std::string pattern = ::testing::TempDir() + "/fovea-model-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = path_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

 private:
  std::string path_;
};

struct FileTensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};
using FileTensors = std::map<std::string, FileTensor>;

inline FileTensor float_tensor(std::vector<std::int64_t> shape, float first = 0) {
  FileTensor tensor{"F32", std::move(shape), {}};
  std::int64_t count = 1;
  for (const std::int64_t extent : tensor.shape) count *= extent;
  for (std::int64_t i = 0; i < count; ++i) {
    // Values of a few bits, exact in every dtype.
    const float value = first + static_cast<float>(i % 7) * 0.25f;
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    tensor.bytes.append(bytes, sizeof value);
  }
  return tensor;
}

/// A file from any header text, right or not.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) {
    bytes.push_back(static_cast<char>(static_cast<std::uint64_t>(header.size()) >> (8 * i)));
  }
  return bytes + header + data;
}

/// The header, as JSON to be changed, and the data that it describes.
inline std::pair<json, std::string> safetensors_parts(const FileTensors& tensors) {
  json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const std::size_t begin = data.size();
    data += tensor.bytes;
    header[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return {header, data};
}

inline std::string safetensors_bytes(const FileTensors& tensors) {
  const auto [header, data] = safetensors_parts(tensors);
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // As writers do, to align the data.
  return safetensors_bytes(text, data);
}

/// A DeepSeek-V3-like config of tiny dims.
inline json tiny_config() {
  return json::parse(R"({
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 3, "max_position_embeddings": 640,
    "rms_norm_eps": 1e-6, "vocab_size": 100, "attention_bias": false, "torch_dtype": "float32",
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16,
                     "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
  })");
}

/// The tensors that tiny_config() describes, with others that attention does not look at.
inline FileTensors tiny_tensors() {
  FileTensors tensors;
  for (int layer = 0; layer < 2; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const std::string attention = prefix + "self_attn.";
    const auto first = static_cast<float>(layer);
    tensors[prefix + "input_layernorm.weight"] = float_tensor({16}, first);
    tensors[prefix + "mlp.gate_proj.weight"] = {"I64", {1}, std::string(8, '\1')};
    tensors[attention + "q_a_proj.weight"] = float_tensor({6, 16}, first);
    tensors[attention + "q_a_layernorm.weight"] = float_tensor({6}, first);
    tensors[attention + "q_b_proj.weight"] = float_tensor({2 * (4 + 2), 6}, first);
    tensors[attention + "kv_a_proj_with_mqa.weight"] = float_tensor({8 + 2, 16}, first);
    tensors[attention + "kv_a_layernorm.weight"] = float_tensor({8}, first);
    tensors[attention + "kv_b_proj.weight"] = float_tensor({2 * (4 + 3), 8}, first);
    tensors[attention + "o_proj.weight"] = float_tensor({16, 2 * 3}, first);
  }
  tensors["lm_head.weight"] = float_tensor({4, 4});
  return tensors;
}

/// Runs `action` and gives the message of the Error that must come out of it.
template <class Action>
std::string error_of(ErrorCode code, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no Error came out";
  return {};
}

inline ::testing::AssertionResult mentions(const std::string& text,
                                           std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    if (text.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "'" << part << "' is not in: " << text;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace fovea::test
