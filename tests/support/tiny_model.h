// A small checkpoint with seeded weights whose logits spread like a trained model's, on disk.
#pragma once

#include <cstdint>
#include <string>

#include "fovea/model.h"

namespace fovea::test {

struct TinyModelOptions {
  std::int64_t num_layers = 2;
  DType dtype = DType::f32;
  std::int64_t max_position = 640;
  std::uint64_t seed = 1;
  /// Standard deviation of logits before YaRN's 1.87. At 3 softmax picks few keys, so that a
  /// mistake in one shows.
  double logit_spread = 3;
  /// Multiplies every dimension, the number of heads included. Few channels and heads do not
  /// average out the rounding of small dtypes.
  std::int64_t width = 1;
  /// Rows of 512 latent and 64 rope channels, whatever the width: what fp8_ds_mla takes.
  bool has_full_rows = false;
  /// Above 0: MiniCPM3-like, with neox pairs and a residual scale of this over sqrt(num_layers).
  double scale_depth = 0;
};

/// DeepSeek-V3-like: width times H 48, Lq 20, L 24, P 12, R 8, V 10; 3 heads, YaRN. Written as
/// config.json and model.safetensors into a directory that is gone afterwards, and loaded.
Model make_tiny_model(const TinyModelOptions& options = {});

/// The same, left in `directory` for a caller that loads it itself.
void write_tiny_model(const std::string& directory, const TinyModelOptions& options);

struct TinyGqaOptions {
  /// "gpt_oss": biases, sinks, YaRN. "gemma3_text": QK-norm, soft cap, a norm before the residual.
  std::string family = "gpt_oss";
  /// Windowed and full layers take turns, a windowed one first.
  std::int64_t num_layers = 4;
  DType dtype = DType::f32;
  std::int64_t max_position = 640;
  std::int64_t sliding_window = 20;  ///< Tokens that a query sees, itself included.
  std::uint64_t seed = 1;
  double logit_spread = 3;  ///< As above.
  std::int64_t width = 1;   ///< Multiplies H 48, D 16 and the 4 heads over 2.
};

Model make_tiny_gqa_model(const TinyGqaOptions& options = {});
void write_tiny_gqa_model(const std::string& directory, const TinyGqaOptions& options);

}  // namespace fovea::test
