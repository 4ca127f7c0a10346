// Checkpoints and presets of grouped-query attention: which tensors are read, and what their layers
// compute.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "fovea/model.h"
#include "model/checkpoint.h"
#include "model/checkpoint_files.h"
#include "model/oracle_weights.h"
#include "support/compare.h"
#include "support/sequence_runner.h"

namespace fovea {
namespace {

using test::error_of;
using test::FileTensors;
using test::json;
using test::mentions;
using test::TempDir;

constexpr std::int64_t kHidden = 24, kHeads = 6, kKvHeads = 2, kHeadDim = 8;
constexpr int kLayers = 3;
constexpr std::int64_t kWindow = 5;

const char* const kFamilies[] = {"gpt_oss", "llama", "qwen2", "qwen3", "mistral", "gemma3_text"};

/// Each family with what sets it apart: windows in some layers, scaled rotation.
json tiny_config(const std::string& model_type) {
  json config = {
      {"model_type", model_type},        {"hidden_size", kHidden}, {"num_attention_heads", kHeads},
      {"num_key_value_heads", kKvHeads}, {"head_dim", kHeadDim},   {"num_hidden_layers", kLayers},
      {"max_position_embeddings", 256},  {"rms_norm_eps", 1e-6},   {"vocab_size", 100},
      {"torch_dtype", "float32"},        {"rope_theta", 10000}};
  const json alternating = {"sliding_attention", "full_attention", "sliding_attention"};
  if (model_type == "gpt_oss") {
    config["layer_types"] = alternating;
    config["sliding_window"] = kWindow;
    config["rope_scaling"] = {{"rope_type", "yarn"},
                              {"factor", 32.0},
                              {"original_max_position_embeddings", 16},
                              {"truncate", false}};
  } else if (model_type == "llama") {
    config["attention_bias"] = true;
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", 8.0},
                              {"low_freq_factor", 1.0},
                              {"high_freq_factor", 4.0},
                              {"original_max_position_embeddings", 64}};
  } else if (model_type == "qwen2") {
    config["use_sliding_window"] = true;
    config["max_window_layers"] = 1;
    config["sliding_window"] = kWindow;
  } else if (model_type == "mistral") {
    config["sliding_window"] = kWindow;
  } else if (model_type == "gemma3_text") {
    config["layer_types"] = alternating;
    config["sliding_window"] = kWindow;
    config["query_pre_attn_scalar"] = 6;
    config["attn_logit_softcapping"] = 4.0;
    config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
    config["rope_local_base_freq"] = 100;
  }
  return config;
}

/// Values of about `spread`, different everywhere.
test::FileTensor noise(std::vector<std::int64_t> shape, float spread) {
  static std::uint32_t state = 1;
  test::FileTensor tensor{"F32", std::move(shape), {}};
  std::int64_t count = 1;
  for (const std::int64_t extent : tensor.shape) count *= extent;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = (static_cast<float>(state >> 8) * 0x1p-23f - 1.f) * 1.7f * spread;
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    tensor.bytes.append(bytes, sizeof value);
  }
  return tensor;
}

FileTensors tiny_tensors(const std::string& model_type, const std::string& prefix = "model.") {
  const bool biased = model_type == "gpt_oss" || model_type == "llama" || model_type == "qwen2";
  FileTensors tensors;
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string at = prefix + "layers." + std::to_string(layer) + ".";
    const std::string attention = at + "self_attn.";
    tensors[at + "input_layernorm.weight"] = noise({kHidden}, 0.5f);
    // The MLP's, except in Gemma.
    tensors[at + "post_attention_layernorm.weight"] = noise({kHidden}, 0.5f);
    const std::int64_t q = kHeads * kHeadDim, kv = kKvHeads * kHeadDim;
    tensors[attention + "q_proj.weight"] = noise({q, kHidden}, 0.4f);
    tensors[attention + "k_proj.weight"] = noise({kv, kHidden}, 0.4f);
    tensors[attention + "v_proj.weight"] = noise({kv, kHidden}, 0.2f);
    tensors[attention + "o_proj.weight"] = noise({kHidden, q}, 0.2f);
    if (biased) {
      tensors[attention + "q_proj.bias"] = noise({q}, 0.5f);
      tensors[attention + "k_proj.bias"] = noise({kv}, 0.5f);
      tensors[attention + "v_proj.bias"] = noise({kv}, 0.5f);
      if (model_type != "qwen2") tensors[attention + "o_proj.bias"] = noise({kHidden}, 0.5f);
    }
    if (model_type == "qwen3" || model_type == "gemma3_text") {
      tensors[attention + "q_norm.weight"] = noise({kHeadDim}, 0.9f);
      tensors[attention + "k_norm.weight"] = noise({kHeadDim}, 0.9f);
    }
    if (model_type == "gpt_oss") tensors[attention + "sinks"] = noise({kHeads}, 1.f);
  }
  return tensors;
}

void write(const TempDir& dir, const json& config, const FileTensors& tensors) {
  dir.write("config.json", config.dump());
  dir.write("model.safetensors", test::safetensors_bytes(tensors));
}

Model load(const std::string& model_type, DType dtype) {
  const TempDir dir;
  write(dir, tiny_config(model_type), tiny_tensors(model_type));
  return Model::load(dir.path(), {.dtype = dtype});
}

const KvGroupConfig& group_of(const Model& model, std::int64_t layer) {
  return model.config().groups[static_cast<std::size_t>(model.layer(layer).kv_group)];
}

/// Rows of the layer's output over `sizes` steps, with `variant` in its plans.
Tensor run_layer(const Model& model, std::int64_t layer, const Tensor& hidden,
                 const std::vector<std::int64_t>& sizes, const AttentionVariant& variant) {
  const Runtime runtime({.num_threads = 2});
  Tensor out = Tensor::empty(model.dtype(), {hidden.view().shape[0], kHidden});
  test::SequenceRunner runner(runtime, std::get<AttentionLayer>(model.layer(layer).attention),
                              hidden.view().shape[0], {.variant = variant});
  runner.run(hidden, out, sizes);
  return out;
}

class GqaModel : public ::testing::TestWithParam<const char*> {};

TEST_P(GqaModel, LayersOfADirectoryAgreeWithTheOracle) {
  constexpr std::int64_t kTokens = 24;
  const std::vector<std::int64_t> sizes = {11, 8, 1, 1, 3};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Model model = load(GetParam(), dtype);
    ASSERT_EQ(model.num_layers(), kLayers);
    const Tensor hidden = Tensor::empty(dtype, {kTokens, kHidden});
    std::vector<std::int64_t> positions;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      token_hidden_state(1, t, hidden.view().select(0, t));
      positions.push_back(t);
    }
    const std::vector<double> x = test::to_doubles(hidden);
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " layer " + std::to_string(layer));
      const KvGroupConfig& group = group_of(model, layer);
      const oracle::GqaWeights weights =
          test::oracle_weights(model.config(), model.gqa_weights(layer), group);
      const auto expected =
          oracle::gqa_layer(weights, x, positions, oracle::gqa_rows(weights, x, positions));
      const Tensor out = run_layer(model, layer, hidden, sizes, group.variant);
      EXPECT_TRUE(test::rows_close(expected, out, test::row_tolerance(dtype, 16)));
      // The comparison must be able to fail.
      AttentionVariant wider = group.variant;
      if (wider.window_left < 0) continue;
      ++wider.window_left;
      EXPECT_FALSE(test::rows_close(expected, run_layer(model, layer, hidden, sizes, wider),
                                    test::row_tolerance(dtype, 16)));
    }
  }
}

FileTensors attention_tensors(const std::string& model_type) {
  FileTensors tensors = tiny_tensors(model_type);
  if (model_type == "gemma3_text") return tensors;
  std::erase_if(tensors, [](const auto& entry) {
    return entry.first.find("post_attention_layernorm") != std::string::npos;
  });
  return tensors;
}

TEST_P(GqaModel, EveryTensorIsNeededAndHasItsShape) {
  const ModelConfig config = parse_model_config(tiny_config(GetParam()).dump(), "c.json");
  auto read = [&](const FileTensors& tensors) {
    const TempDir dir;
    dir.write("model.safetensors", test::safetensors_bytes(tensors));
    Checkpoint checkpoint(dir.path());
    for (int layer = 0; layer < kLayers; ++layer) read_layer(checkpoint, config, layer);
  };
  const FileTensors right = attention_tensors(GetParam());
  EXPECT_NO_THROW(read(right));
  for (const auto& [name, tensor] : right) {
    FileTensors tensors = right;
    tensors.erase(name);
    EXPECT_TRUE(mentions(error_of(ErrorCode::corrupt_file, [&] { read(tensors); }),
                         {"model.safetensors", name.c_str()}));
    std::vector<std::int64_t> shape = tensor.shape;
    shape[0] += 1;
    tensors[name] = noise(shape, 1);
    EXPECT_TRUE(mentions(error_of(ErrorCode::corrupt_file, [&] { read(tensors); }),
                         {"model.safetensors", name.c_str(), "shape"}));
  }
  for (const char* name : {"q_proj.bias", "o_proj.bias", "q_norm.weight", "sinks",
                           "qkv_proj.weight", "kv_b_proj.weight", "k_proj.weight_scale"}) {
    const std::string full = std::string("model.layers.1.self_attn.") + name;
    if (right.count(full) > 0) continue;
    FileTensors tensors = right;
    tensors[full] = noise({1}, 1);
    EXPECT_TRUE(mentions(error_of(ErrorCode::unsupported, [&] { read(tensors); }), {name}));
  }
}

// B122
TEST_P(GqaModel, ScalesOfAQuantisedCacheChangeNothing) {
  FileTensors tensors = tiny_tensors(GetParam());
  const TempDir plain, scaled;
  write(plain, tiny_config(GetParam()), tensors);
  for (const char* name : {"k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale"}) {
    tensors[std::string("model.layers.0.self_attn.") + name] = test::float_tensor({1}, 0.0625f);
  }
  write(scaled, tiny_config(GetParam()), tensors);
  const Model a = Model::load(plain.path(), {.dtype = DType::f32});
  const Model b = Model::load(scaled.path(), {.dtype = DType::f32});
  EXPECT_TRUE(test::bits_equal(a.gqa_weights(0).k_proj, b.gqa_weights(0).k_proj));
}

std::string family_name(const ::testing::TestParamInfo<const char*>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(Families, GqaModel, ::testing::ValuesIn(kFamilies), family_name);

TEST(GqaModelFiles, GemmaStoresItsNormsLessOne) {
  const TempDir dir;
  FileTensors tensors = tiny_tensors("gemma3_text");
  for (auto& [name, tensor] : tensors) {
    if (name.find("norm") != std::string::npos) tensor = test::float_tensor(tensor.shape, -0.5f);
  }
  write(dir, tiny_config("gemma3_text"), tensors);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Model model = Model::load(dir.path(), {.dtype = dtype});
    for (const TensorView& norm :
         {model.layer(1).input_layernorm.view(), model.layer(1).post_attention_layernorm.view(),
          model.gqa_weights(1).q_norm, model.gqa_weights(1).k_norm}) {
      ASSERT_TRUE(norm);
      EXPECT_EQ(norm.dtype, dtype);
      const std::vector<double> values = test::to_doubles(norm);
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(values[i], 0.5 + 0.25 * static_cast<double>(i % 7));
      }
    }
  }
  // w - 1 holds more digits than w: they are added before the only rounding.
  test::FileTensor half{"BF16", {kHidden}, {}};
  for (std::int64_t i = 0; i < kHidden; ++i) {
    const BFloat16 value = from_float<BFloat16>(0x1.02p-9f);
    half.bytes.push_back(static_cast<char>(value.bits & 0xff));
    half.bytes.push_back(static_cast<char>(value.bits >> 8));
  }
  tensors["model.layers.0.input_layernorm.weight"] = half;
  write(dir, tiny_config("gemma3_text"), tensors);
  const Model exact = Model::load(dir.path(), {.num_layers = 1, .dtype = DType::f32});
  EXPECT_EQ(exact.layer(0).input_layernorm.ptr<float>()[3], 1.f + 0x1.02p-9f);
}

TEST(GqaModelFiles, OtherFamiliesHaveNoNormBehindAttention) {
  const Model model = load("qwen3", DType::f32);
  EXPECT_FALSE(model.layer(0).post_attention_layernorm);
  EXPECT_THROW(model.mla_weights(0), Error);
  EXPECT_THROW(model.gqa_weights(3), Error);
  EXPECT_GT(model.weight_bytes(), 0);
}

TEST(GqaModelFiles, LanguageModelsInsideOthersAreFound) {
  for (const char* prefix : {"", "language_model.model.", "model.language_model."}) {
    json config = {{"model_type", "gemma3"}, {"text_config", tiny_config("gemma3_text")}};
    const TempDir dir;
    FileTensors tensors = tiny_tensors("gemma3_text", prefix);
    tensors["vision_tower.encoder.layers.0.self_attn.q_proj.weight"] = noise({2, 2}, 1);
    write(dir, config, tensors);
    EXPECT_EQ(Model::load(dir.path(), {.dtype = DType::f32}).num_layers(), kLayers) << prefix;
  }
}

TEST(GqaModelFiles, GroupsAreThoseOfTheLayersThatWereAskedFor) {
  const TempDir dir;
  write(dir, tiny_config("gpt_oss"), tiny_tensors("gpt_oss"));
  const Model one = Model::load(dir.path(), {.num_layers = 1, .dtype = DType::f32});
  ASSERT_EQ(one.config().groups.size(), 1u);
  EXPECT_EQ(one.config().groups[0].variant.window_left, kWindow - 1);
  EXPECT_EQ(one.config().layer_group, std::vector<std::int32_t>{0});
  EXPECT_EQ(one.config().num_layers, kLayers);
  const Model two =
      Model::load(dir.path(), {.num_layers = 2, .dtype = DType::f32, .max_position = 64});
  ASSERT_EQ(two.config().groups.size(), 2u);
  EXPECT_EQ(two.layer(1).kv_group, 1);
  for (const KvGroupConfig& group : two.config().groups) {
    EXPECT_EQ(group.rope.max_position, 64);
  }
}

// ---------------------------------------------------------------- presets

const ModelConfig& preset(std::string_view name) {
  const auto& presets = model_presets();
  return std::find_if(presets.begin(), presets.end(),
                      [&](const PresetInfo& p) { return p.name == name; })
      ->config;
}

TEST(GqaPresets, HaveThePublishedDimensions) {
  auto expect = [](std::string_view name, std::vector<std::int64_t> dims, double theta,
                   std::vector<std::int64_t> windows) {
    const ModelConfig& c = preset(name);
    const GqaDims& d = c.gqa;
    EXPECT_EQ((std::vector<std::int64_t>{c.num_layers, c.hidden_size, d.num_heads, d.num_kv_heads,
                                         d.head_dim, c.vocab_size, c.max_position}),
              dims)
        << name;
    EXPECT_EQ(d.hidden_size, c.hidden_size);
    EXPECT_EQ(d.v_head_dim, d.head_dim);
    EXPECT_FLOAT_EQ(d.sm_scale, static_cast<float>(1 / std::sqrt(d.head_dim))) << name;
    std::vector<std::int64_t> got;
    for (const KvGroupConfig& group : c.groups) {
      got.push_back(group.variant.window_left + 1);
      EXPECT_EQ(group.rope.dim, d.head_dim);
      EXPECT_EQ(group.rope.max_position, c.max_position);
      EXPECT_EQ(group.rope.pairing, RopePairing::neox);
    }
    EXPECT_EQ(got, windows) << name;
    EXPECT_EQ(c.groups.back().rope.theta, theta) << name;
    EXPECT_EQ(c.layer_group.size(), static_cast<std::size_t>(c.num_layers));
  };
  expect("gpt-oss-20b", {24, 2880, 64, 8, 64, 201088, 131072}, 150000, {128, 0});
  expect("gpt-oss-120b", {36, 2880, 64, 8, 64, 201088, 131072}, 150000, {128, 0});
  expect("llama-2-7b", {32, 4096, 32, 32, 128, 32000, 4096}, 10000, {0});
  expect("llama-3-8b", {32, 4096, 32, 8, 128, 128256, 8192}, 500000, {0});
  expect("qwen2-7b", {28, 3584, 28, 4, 128, 152064, 131072}, 1000000, {0});
  expect("qwen3-8b", {36, 4096, 32, 8, 128, 151936, 40960}, 1000000, {0});
  expect("mistral-7b", {32, 4096, 32, 8, 128, 32000, 32768}, 10000, {4096});
  expect("gemma-3-4b", {34, 2560, 8, 4, 256, 262208, 131072}, 1000000, {1024, 0});
}

TEST(GqaPresets, HaveWhatSetsTheirFamiliesApart) {
  for (const char* name : {"gpt-oss-20b", "gpt-oss-120b"}) {
    const ModelConfig& c = preset(name);
    EXPECT_TRUE(c.attention_bias && c.o_bias && c.sinks);
    for (std::size_t i = 0; i < c.layer_group.size(); ++i) {
      EXPECT_EQ(c.layer_group[i], static_cast<int>(i % 2));
    }
    EXPECT_FALSE(std::get<YarnScaling>(c.groups[1].rope.scaling).truncate);
    EXPECT_EQ(std::get<YarnScaling>(c.groups[0].rope.scaling).factor, 32);
  }
  EXPECT_TRUE(preset("qwen2-7b").attention_bias);
  EXPECT_FALSE(preset("qwen2-7b").o_bias);
  EXPECT_EQ(preset("qwen3-8b").qk_norm, QkNorm::pre_rope);
  EXPECT_FALSE(preset("llama-3-8b").attention_bias);
  const ModelConfig& gemma = preset("gemma-3-4b");
  EXPECT_TRUE(gemma.post_attention_norm && gemma.norm_weights_minus_one);
  EXPECT_EQ(gemma.qk_norm, QkNorm::pre_rope);
  EXPECT_EQ(gemma.groups[0].rope.theta, 10000);
  EXPECT_EQ(std::get<LinearScaling>(gemma.groups[1].rope.scaling).factor, 8);
  for (std::size_t i = 0; i < 34; ++i) EXPECT_EQ(gemma.layer_group[i], i % 6 == 5 ? 1 : 0);
}

TEST(GqaPresets, LoadWithTheirSeed) {
  const Model model = Model::load("gemma-3-4b", {.seed = 3, .max_position = 64});
  EXPECT_EQ(model.num_layers(), 1);
  EXPECT_EQ(model.config().groups.size(), 1u);
  EXPECT_EQ(model.gqa_weights(0).o_proj.dtype, DType::bf16);
  EXPECT_EQ(std::get<AttentionLayer>(model.layer(0).attention).dims().head_dim, 256);
  // Norm weights are w here, whatever the checkpoints store.
  const std::vector<double> norm = test::to_doubles(model.layer(0).post_attention_layernorm);
  double mean = 0;
  for (const double w : norm) mean += w / static_cast<double>(norm.size());
  EXPECT_NEAR(mean, 1, 0.05);
  const Model other = Model::load("gemma-3-4b", {.seed = 4, .max_position = 64});
  EXPECT_FALSE(test::bits_equal(model.gqa_weights(0).o_proj, other.gqa_weights(0).o_proj));
}

}  // namespace
}  // namespace fovea
