// Cases of make_goldens.py: configs, stored results, and the hidden states that both sides make.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fovea/model.h"
#include "model/safetensors.h"

namespace fovea::test {

constexpr std::uint64_t kGoldenSeed = 11;

/// Of the configs in a folder beside the tests.
inline std::vector<std::string> case_names(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(FOVEA_TEST_DATA) + "/" + folder)) {
    names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

inline ModelConfig read_config(const std::string& folder, const std::string& name) {
  const std::string path = std::string(FOVEA_TEST_DATA) + "/" + folder + "/" + name + ".json";
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return parse_model_config(text.str(), path);
}

/// What make_goldens.py wrote.
class Goldens {
 public:
  Goldens() : file_(std::string(FOVEA_TEST_DATA) + "/goldens.safetensors") {}

  TensorView operator[](const std::string& name) const {
    const SafetensorsEntry* entry = file_.find(name);
    if (entry == nullptr) throw std::runtime_error("no golden " + name);
    return file_.view(*entry);
  }

 private:
  SafetensorsFile file_;
};

/// Of tokens 0 to tokens - 1, f32.
inline Tensor hidden_states(std::int64_t tokens, std::int64_t hidden_size) {
  Tensor hidden = Tensor::empty(DType::f32, {tokens, hidden_size});
  for (std::int64_t t = 0; t < tokens; ++t) {
    token_hidden_state(kGoldenSeed, t, hidden.view().select(0, t));
  }
  return hidden;
}

/// How a sequence is cut into steps.
struct Steps {
  const char* name;
  std::vector<std::int64_t> sizes;
  std::int64_t workspace_rows = 1 << 16;
  std::size_t least_chunks = 0;  ///< Of context, with MLA.
};

inline std::vector<Steps> ways_to_run(std::int64_t tokens) {
  std::vector<std::int64_t> decode(static_cast<std::size_t>(tokens - tokens / 2), 1);
  decode.front() = tokens / 2;
  decode.push_back(1);
  std::vector<std::int64_t> pieces;
  for (std::int64_t left = tokens; left > 0; left -= pieces.back()) {
    pieces.push_back(std::min<std::int64_t>(left, 7));
  }
  return {{"one prefill", {tokens}},
          {"chunked prefill", pieces, 8, 2},
          {"prefill, then decode", decode, 8},
          {"decode alone", std::vector<std::int64_t>(static_cast<std::size_t>(tokens), 1)}};
}

inline std::string name_of_case(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

}  // namespace fovea::test
