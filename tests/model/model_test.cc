#include "fovea/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "model/checkpoint_files.h"
#include "model/oracle_weights.h"
#include "support/compare.h"
#include "support/sequence_runner.h"

namespace fovea {
namespace {

using test::error_of;
using test::json;
using test::mentions;
using test::TempDir;

/// A right directory, with values that give attention something to tell apart.
void write_checkpoint(const TempDir& dir) {
  dir.write("config.json", test::tiny_config().dump());
  dir.write("model.safetensors", test::safetensors_bytes(test::tiny_tensors()));
}

const PresetInfo& preset(std::string_view name) {
  const auto& presets = model_presets();
  return *std::find_if(presets.begin(), presets.end(),
                       [&](const PresetInfo& p) { return p.name == name; });
}

TEST(Model, PresetsHaveThePublishedDimensions) {
  ASSERT_EQ(model_presets().size(), 14u);
  auto expect = [](std::string_view name, std::vector<std::int64_t> dims, float sm_scale) {
    const ModelConfig& c = preset(name).config;
    const MlaDims& d = c.mla;
    EXPECT_EQ((std::vector<std::int64_t>{c.num_layers, d.hidden_size, d.num_heads, d.q_lora_rank,
                                         d.kv_lora_rank, d.qk_nope_head_dim, d.qk_rope_head_dim,
                                         d.v_head_dim, c.vocab_size, c.max_position}),
              dims)
        << name;
    EXPECT_NEAR(d.sm_scale, sm_scale, 1e-6) << name;
    EXPECT_EQ(c.groups[0].rope.dim, d.qk_rope_head_dim);
    EXPECT_EQ(c.groups[0].rope.max_position, c.max_position);
    EXPECT_EQ(c.groups[0].rope.pairing,
              name == "minicpm3-4b" ? RopePairing::neox : RopePairing::interleaved);
  };
  expect("deepseek-v2", {60, 5120, 128, 1536, 512, 128, 64, 128, 102400, 163840}, 0.114721f);
  expect("deepseek-v2-lite", {27, 2048, 16, 0, 512, 128, 64, 128, 102400, 163840}, 0.114721f);
  expect("deepseek-v3", {61, 7168, 128, 1536, 512, 128, 64, 128, 129280, 163840}, 0.135234f);
  expect("kimi-k2", {61, 7168, 64, 1536, 512, 128, 64, 128, 163840, 131072}, 0.130861f);
  expect("minicpm3-4b", {62, 2560, 40, 768, 256, 64, 32, 64, 73448, 32768}, 0.102062f);
  expect("glm-4.7-flash", {47, 2048, 20, 768, 512, 192, 64, 256, 154880, 202752}, 0.0625f);
}

TEST(Model, LoadsAPresetWithItsSeed) {
  Model::Options options;
  options.max_position = 64;
  options.seed = 3;
  const Model model = Model::load("minicpm3-4b", options);
  EXPECT_EQ(model.num_layers(), 1);
  EXPECT_EQ(model.dtype(), DType::bf16);
  EXPECT_EQ(model.mla_weights(0).o_proj.dtype, DType::bf16);
  EXPECT_EQ(std::get<MlaLayer>(model.layer(0).attention).dtype(), DType::bf16);
  EXPECT_EQ(model.layer(0).input_layernorm.view().shape[0], 2560);
  EXPECT_EQ(model.config().groups[0].rope.max_position, 64);
  EXPECT_EQ(model.config().max_position, 32768);
  EXPECT_GT(model.weight_bytes(), 2 * 2560 * 40 * 64);
  options.seed = 4;
  const Model other = Model::load("minicpm3-4b", options);
  EXPECT_FALSE(test::bits_equal(model.mla_weights(0).o_proj, other.mla_weights(0).o_proj));
}

TEST(Model, LoadsADirectoryWithoutCopyingWhatFits) {
  const TempDir dir;
  write_checkpoint(dir);
  Model::Options options;
  options.dtype = DType::f32;
  Model loaded = Model::load(dir.path(), options);
  std::filesystem::remove_all(dir.path());  // The mapping stays.
  const Model model = std::move(loaded);
  EXPECT_EQ(model.num_layers(), 2);
  EXPECT_EQ(model.config().dtype, DType::f32);
  EXPECT_EQ(*model.mla_weights(1).o_proj.ptr<float>({0, 1}), 1.25f);
  EXPECT_EQ(model.layer(1).input_layernorm.ptr<float>()[1], 1.25f);
  EXPECT_THROW(model.layer(2), Error);
  EXPECT_THROW(model.mla_weights(-1), Error);
  EXPECT_THROW(model.gqa_weights(0), Error);
}

TEST(Model, LayersOfADirectoryAgreeWithTheOracle) {
  const TempDir dir;
  write_checkpoint(dir);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Model::Options options;
    options.dtype = dtype;
    const Model model = Model::load(dir.path(), options);
    constexpr std::int64_t kTokens = 24;
    const Tensor hidden = Tensor::empty(dtype, {kTokens, 16});
    const Tensor out = Tensor::empty(dtype, {kTokens, 16});
    std::vector<std::int64_t> positions;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      token_hidden_state(1, t, hidden.view().select(0, t));
      positions.push_back(t);
    }
    const Runtime runtime({.num_threads = 2});
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      test::SequenceRunner runner(runtime, std::get<MlaLayer>(model.layer(layer).attention),
                                  kTokens);
      runner.run(hidden, out, std::vector<std::int64_t>{20, 1, 1, 2});
      const oracle::MlaWeights weights =
          test::oracle_weights(model.config(), model.mla_weights(layer));
      const std::vector<double> x = test::to_doubles(hidden);
      const auto expected =
          oracle::mla_layer(weights, x, positions, oracle::mla_latent_rows(weights, x, positions),
                            oracle::MlaForm::expanded);
      EXPECT_TRUE(test::rows_close(expected, out, test::row_tolerance(dtype, 8)))
          << name_of(dtype) << " layer " << layer;
    }
  }
}

TEST(Model, ChoosesLayersOnRequest) {
  const TempDir dir;
  write_checkpoint(dir);
  Model::Options options;
  options.num_layers = 1;
  EXPECT_EQ(Model::load(dir.path(), options).num_layers(), 1);
  for (const std::int64_t wrong : {0, 3, -2}) {
    options.num_layers = wrong;
    EXPECT_TRUE(
        mentions(error_of(ErrorCode::invalid_argument, [&] { Model::load(dir.path(), options); }),
                 {"num_layers", "[1, 2]"}));
  }
}

TEST(Model, ErrorsNameTheFile) {
  const TempDir dir;
  auto load = [&] { Model::load(dir.path(), {}); };
  EXPECT_TRUE(mentions(error_of(ErrorCode::invalid_argument, load),
                       {dir.path().c_str(), "config.json", "deepseek-v2-lite"}));
  dir.write("config.json", "{");
  EXPECT_TRUE(mentions(error_of(ErrorCode::corrupt_file, load), {"config.json"}));
  dir.write("config.json", test::tiny_config().dump());
  EXPECT_TRUE(mentions(error_of(ErrorCode::corrupt_file, load), {"neither model.safetensors"}));
  const std::string bytes = test::safetensors_bytes(test::tiny_tensors());
  dir.write("model.safetensors", bytes.substr(0, bytes.size() - 1));
  EXPECT_TRUE(
      mentions(error_of(ErrorCode::corrupt_file, load), {"model.safetensors", "truncated"}));

  json long_config = test::tiny_config();
  long_config["max_position_embeddings"] = 1 << 24;
  long_config["qk_rope_head_dim"] = 32;
  test::FileTensors tensors = test::tiny_tensors();
  for (auto& [name, tensor] : tensors) {
    if (name.find("q_b_proj") != std::string::npos) tensor = test::float_tensor({2 * 36, 6});
    if (name.find("kv_a_proj") != std::string::npos) tensor = test::float_tensor({8 + 32, 16});
  }
  dir.write("config.json", long_config.dump());
  dir.write("model.safetensors", test::safetensors_bytes(tensors));
  EXPECT_TRUE(mentions(error_of(ErrorCode::unsupported, load),
                       {"max_position_embeddings", "Options::max_position"}));
  EXPECT_NO_THROW(Model::load(dir.path(), {.max_position = 64}));

  EXPECT_TRUE(mentions(
      error_of(ErrorCode::invalid_argument, [&] { Model::load("kimi-k2", {.dtype = DType::i8}); }),
      {"dtype"}));
}

}  // namespace
}  // namespace fovea
