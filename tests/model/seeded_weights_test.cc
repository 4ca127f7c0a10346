#include "model/seeded_weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "fovea/error.h"
#include "model/oracle_weights.h"
#include "support/compare.h"

namespace fovea {
namespace {

ModelConfig small_config() {
  ModelConfig config;
  config.mla = {.hidden_size = 48,
                .num_heads = 8,
                .q_lora_rank = 24,
                .kv_lora_rank = 40,
                .qk_nope_head_dim = 6,
                .qk_rope_head_dim = 4,
                .v_head_dim = 5,
                .sm_scale = 0.25f};
  config.groups.resize(1);
  config.groups[0].rope.dim = 4;
  config.hidden_size = 48;
  config.attention_bias = true;
  config.o_bias = true;
  return config;
}

LayerMemory make(const ModelConfig& config, std::uint64_t seed, std::int64_t layer, DType dtype,
                 int threads = 2) {
  return seeded_layer(config, seed, layer, dtype, *make_std_thread_pool(threads));
}

/// FNV-1a over the bits of f32 values.
std::uint64_t fingerprint(const TensorView& view) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, static_cast<const float*>(view.data) + i, sizeof bits);
    hash = (hash ^ bits) * 0x100000001b3;
  }
  return hash;
}

// The expected numbers come from tests/golden/seeded_weights.py.
TEST(SeededWeights, EqualTheScriptsBitForBit) {
  ModelConfig config = small_config();
  const LayerMemory layer = make(config, 7, 3, DType::f32);
  const MlaWeights& w = layer.tensors.mla;
  EXPECT_EQ(fingerprint(layer.tensors.input_layernorm), 0xcccb9e2cd7ce386f);
  EXPECT_EQ(fingerprint(w.q_a_proj), 0x17adc394b20d6916u);
  EXPECT_EQ(fingerprint(w.q_a_layernorm), 0xa4fa5b6bd124e809);
  EXPECT_EQ(fingerprint(w.q_b_proj), 0x2a7baabbf2832c4cu);
  EXPECT_EQ(fingerprint(w.kv_a_proj), 0xfb899a97cd008623);
  EXPECT_EQ(fingerprint(w.kv_a_layernorm), 0xc33482e6fcb0d627);
  EXPECT_EQ(fingerprint(w.kv_b_proj), 0x990a06128d3343u);
  EXPECT_EQ(fingerprint(w.o_proj), 0xec9b8f342f23cdf5);
  EXPECT_EQ(fingerprint(w.q_a_bias), 0x631b8781eae331e9u);
  EXPECT_EQ(fingerprint(w.kv_a_bias), 0x26894ed6e277c90eu);
  EXPECT_EQ(fingerprint(w.o_bias), 0xf486647cf1036897);

  config.mla.q_lora_rank = 0;
  const LayerMemory plain = make(config, 7, 3, DType::f32);
  EXPECT_EQ(fingerprint(plain.tensors.mla.q_b_proj), 0x8d01d449f303a443);
  EXPECT_FALSE(plain.tensors.mla.q_a_proj);
  EXPECT_FALSE(plain.tensors.mla.q_a_bias);
}

ModelConfig small_gqa_config() {
  ModelConfig config;
  config.hidden_size = 48;
  config.gqa = {.hidden_size = 48,
                .num_heads = 12,
                .num_kv_heads = 4,
                .head_dim = 10,
                .v_head_dim = 10,
                .sm_scale = 0.25f};
  config.groups.resize(1);
  config.groups[0].rope.dim = 10;
  config.layer_group = {0, 0, 0, 0};
  return config;
}

TEST(SeededWeights, OfGroupedQueriesEqualTheScriptsBitForBit) {
  ModelConfig config = small_gqa_config();
  config.attention_bias = config.o_bias = config.sinks = true;
  config.groups[0].rope.scaling = YarnScaling{.factor = 32};
  const LayerMemory layer = make(config, 7, 3, DType::f32);
  const AttentionWeights& w = layer.tensors.gqa;
  EXPECT_EQ(fingerprint(layer.tensors.input_layernorm), 0xcccb9e2cd7ce386fu);
  EXPECT_EQ(fingerprint(w.q_proj), 0x17b4d46064658fd1u);
  EXPECT_EQ(fingerprint(w.k_proj), 0x91e106a118d533a0u);
  EXPECT_EQ(fingerprint(w.v_proj), 0x739f31bc4ef5527du);
  EXPECT_EQ(fingerprint(w.o_proj), 0xca4e17c8bfba0ac1u);
  EXPECT_EQ(fingerprint(w.q_bias), 0x679d750fb8cb23a8u);
  EXPECT_EQ(fingerprint(w.k_bias), 0x9eea2dcc9d45587du);
  EXPECT_EQ(fingerprint(w.v_bias), 0x8b12cf3e3b185e9bu);
  EXPECT_EQ(fingerprint(w.o_bias), 0xf486647cf1036897u);
  EXPECT_EQ(fingerprint(w.sinks), 0x2df680190f1aa0c5u);
  EXPECT_FALSE(w.q_norm || w.k_norm || layer.tensors.post_attention_layernorm);
  EXPECT_FALSE(layer.tensors.mla.kv_b_proj);

  config = small_gqa_config();
  config.qk_norm = QkNorm::pre_rope;
  config.post_attention_norm = true;
  config.norm_weights_minus_one = true;  // Of files: seeded norms are w.
  const LayerMemory normed = make(config, 7, 3, DType::f32);
  EXPECT_EQ(fingerprint(normed.tensors.post_attention_layernorm), 0xbed4a658be5b501au);
  EXPECT_EQ(fingerprint(normed.tensors.gqa.q_proj), 0x4589785548511807u);
  EXPECT_EQ(fingerprint(normed.tensors.gqa.q_norm), 0x1d38652f6b78e7a9u);
  EXPECT_EQ(fingerprint(normed.tensors.gqa.k_norm), 0xc8c2b7f1c2d8b4efu);
  EXPECT_FALSE(normed.tensors.gqa.q_bias || normed.tensors.gqa.o_bias || normed.tensors.gqa.sinks);
}

TEST(SeededWeights, HiddenStatesEqualTheScriptsBitForBit) {
  const Tensor row = Tensor::empty(DType::f32, {2048});
  token_hidden_state(7, 12345, row);
  EXPECT_EQ(row.ptr<float>()[0], -0x1.63aa72p-2f);
  EXPECT_EQ(row.ptr<float>()[1], 0x1.210a14p+1f);
  EXPECT_EQ(row.ptr<float>()[2], -0x1.f1386ap-1f);
  EXPECT_EQ(row.ptr<float>()[2047], -0x1.61ef0ap-2f);
}

TEST(SeededWeights, ThreadsDoNotMatterAndDtypesOnlyRound) {
  const ModelConfig config = small_config();
  LayerMemory one = make(config, 1, 0, DType::f32, 1);
  LayerMemory three = make(config, 1, 0, DType::f32, 3);
  LayerMemory half = make(config, 1, 0, DType::bf16, 2);
  std::vector<TensorView> views;
  for_each_tensor(one.tensors, [&](TensorView& view) { views.push_back(view); });
  std::size_t i = 0;
  for_each_tensor(three.tensors,
                  [&](TensorView& view) { EXPECT_TRUE(test::bits_equal(views[i++], view)); });
  i = 0;
  for_each_tensor(half.tensors, [&](TensorView& view) {
    const Tensor rounded = Tensor::empty(
        DType::bf16, std::span(view.shape.data(), static_cast<std::size_t>(view.ndim)));
    copy(views[i++], rounded);
    EXPECT_TRUE(test::bits_equal(rounded, view));
  });
  EXPECT_EQ(i, 11u);
}

TEST(SeededWeights, SeedLayerAndTokenChangeEverything) {
  const ModelConfig config = small_config();
  EXPECT_NE(fingerprint(make(config, 1, 0, DType::f32).tensors.mla.o_proj),
            fingerprint(make(config, 2, 0, DType::f32).tensors.mla.o_proj));
  EXPECT_NE(fingerprint(make(config, 1, 0, DType::f32).tensors.mla.o_proj),
            fingerprint(make(config, 1, 1, DType::f32).tensors.mla.o_proj));
  std::map<std::uint64_t, int> seen;
  const Tensor row = Tensor::empty(DType::f32, {8});
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    for (std::int64_t token = 0; token < 50; ++token) {
      token_hidden_state(seed, token, row);
      ++seen[fingerprint(row)];
    }
  }
  EXPECT_EQ(seen.size(), 1000u);
}

TEST(SeededWeights, HiddenStatesFillAnyRowAndNothingElse) {
  const Tensor plain = Tensor::empty(DType::f32, {16});
  token_hidden_state(3, 9, plain);
  const Tensor wide = Tensor::zeros(DType::f16, {16, 2});
  token_hidden_state(3, 9, wide.view().select(1, 0));
  for (std::int64_t c = 0; c < 16; ++c) {
    EXPECT_EQ(to_float(*wide.ptr<Float16>({c, 0})),
              to_float(from_float<Float16>(plain.ptr<float>()[c])));
    EXPECT_EQ(wide.ptr<Float16>({c, 1})->bits, 0);
  }
  EXPECT_THROW(token_hidden_state(3, 9, TensorView{}), Error);
  EXPECT_THROW(token_hidden_state(3, 9, Tensor::empty(DType::f32, {2, 8})), Error);
  EXPECT_THROW(token_hidden_state(3, 9, Tensor::empty(DType::i32, {16})), Error);
}

struct Moments {
  double mean = 0, std = 0, largest = 0;
};
Moments moments(std::span<const double> x) {
  Moments m;
  for (const double v : x) m.mean += v / static_cast<double>(x.size());
  for (const double v : x) {
    m.std += (v - m.mean) * (v - m.mean) / static_cast<double>(x.size());
    m.largest = std::max(m.largest, std::abs(v));
  }
  m.std = std::sqrt(m.std);
  return m;
}

TEST(SeededWeights, ValuesAreAboutNormal) {
  const Tensor row = Tensor::empty(DType::f32, {100000});
  token_hidden_state(0, 0, row);
  const std::vector<double> x = test::to_doubles(row);
  const Moments m = moments(x);
  EXPECT_NEAR(m.mean, 0, 0.015);
  EXPECT_NEAR(m.std, 1, 0.01);
  EXPECT_LT(m.largest, 3.47);
  double fourth = 0;
  for (const double v : x) fourth += v * v * v * v / 1e5;
  EXPECT_NEAR(fourth, 2.7, 0.1);  // 3 - 1.2 / 4 for the sum of four uniforms.
}

/// Logits of each head for one query: those of the keys before it, its own last.
struct HeadLogits {
  std::int64_t head;
  std::vector<double> logits;
};

/// Normed hidden states of the first tokens, and their positions.
struct LayerInput {
  std::vector<double> hidden;
  std::vector<std::int64_t> positions;
};

LayerInput make_input(const LayerMemory& layer, std::int64_t hidden_size, std::int64_t num_tokens) {
  LayerInput input;
  const Tensor row = Tensor::empty(DType::f32, {hidden_size});
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    token_hidden_state(0, 17 * t + 5, row);
    const std::vector<double> x = test::to_doubles(row);
    input.hidden.insert(input.hidden.end(), x.begin(), x.end());
    input.positions.push_back(t);
  }
  input.hidden =
      oracle::rms_norm(input.hidden, test::to_doubles(layer.tensors.input_layernorm), 1e-6);
  return input;
}

/// Of the last `num_queries` of `num_tokens` tokens, in float64.
std::vector<HeadLogits> measure_logits(const ModelConfig& config, const LayerMemory& layer,
                                       std::int64_t num_tokens, std::int64_t num_queries) {
  const MlaDims& d = config.mla;
  oracle::MlaWeights weights = test::oracle_weights(config, layer.tensors.mla);
  weights.o_proj.clear();
  const auto [hidden, positions] = make_input(layer, d.hidden_size, num_tokens);
  const std::vector<double> rows = oracle::mla_latent_rows(weights, hidden, positions);
  const std::vector<double> queries = oracle::mla_queries(
      weights, std::span(hidden).last(static_cast<std::size_t>(num_queries * d.hidden_size)),
      std::span(positions).last(static_cast<std::size_t>(num_queries)));

  std::vector<HeadLogits> result;
  for (std::int64_t i = 0; i < num_queries * d.num_heads; ++i) {
    const std::int64_t head = i % d.num_heads;
    const std::int64_t keys = num_tokens - num_queries + i / d.num_heads + 1;
    const double* query = queries.data() + i * d.qk_head_dim();
    std::vector<double> absorbed(static_cast<std::size_t>(d.latent_dim()), 0.0);
    for (std::int64_t p = 0; p < d.qk_nope_head_dim; ++p) {
      const double* w_uk = weights.kv_b_proj.data() +
                           (head * (d.qk_nope_head_dim + d.v_head_dim) + p) * d.kv_lora_rank;
      for (std::int64_t l = 0; l < d.kv_lora_rank; ++l) {
        absorbed[static_cast<std::size_t>(l)] += query[p] * w_uk[l];
      }
    }
    std::copy(query + d.qk_nope_head_dim, query + d.qk_head_dim(),
              absorbed.begin() + d.kv_lora_rank);
    HeadLogits& of_head = result.emplace_back(HeadLogits{head, {}});
    for (std::int64_t t = 0; t < keys; ++t) {
      of_head.logits.push_back(d.sm_scale * std::inner_product(absorbed.begin(), absorbed.end(),
                                                               rows.begin() + t * d.latent_dim(),
                                                               0.0));
    }
  }
  return result;
}

/// The same of grouped queries.
std::vector<HeadLogits> measure_gqa_logits(const ModelConfig& config, const LayerMemory& layer,
                                           const KvGroupConfig& group, std::int64_t num_tokens,
                                           std::int64_t num_queries) {
  const GqaDims& d = config.gqa;
  oracle::GqaWeights weights = test::oracle_weights(config, layer.tensors.gqa, group);
  const auto [hidden, positions] = make_input(layer, d.hidden_size, num_tokens);
  const std::vector<double> rows = oracle::gqa_rows(weights, hidden, positions);
  const std::vector<double> queries = oracle::gqa_queries(
      weights, std::span(hidden).last(static_cast<std::size_t>(num_queries * d.hidden_size)),
      std::span(positions).last(static_cast<std::size_t>(num_queries)));
  std::vector<HeadLogits> result;
  for (std::int64_t i = 0; i < num_queries * d.num_heads; ++i) {
    const std::int64_t head = i % d.num_heads;
    const std::int64_t keys = num_tokens - num_queries + i / d.num_heads + 1;
    const double* query = queries.data() + i * d.head_dim;
    const std::int64_t column = head / (d.num_heads / d.num_kv_heads) * d.head_dim;
    HeadLogits& of_head = result.emplace_back(HeadLogits{head, {}});
    for (std::int64_t t = 0; t < keys; ++t) {
      const double* key = rows.data() + t * (d.k_size() + d.v_size()) + column;
      of_head.logits.push_back(d.sm_scale *
                               std::inner_product(query, query + d.head_dim, key, 0.0));
    }
  }
  return result;
}

std::vector<double> softmax(std::span<const double> logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  std::vector<double> weights;
  for (const double x : logits) weights.push_back(std::exp(x - top));
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) weight /= sum;
  return weights;
}

double mean(std::span<const double> x) { return moments(x).mean; }

const PresetInfo& preset_of(std::string_view name) {
  const auto& presets = model_presets();
  return *std::find_if(presets.begin(), presets.end(),
                       [&](const PresetInfo& p) { return p.name == name; });
}

/// Of all heads, and of their kinds.
struct LogitStatistics {
  std::vector<double> stds, peaked, plain, own_weights;
};

LogitStatistics statistics(const std::vector<HeadLogits>& all) {
  LogitStatistics result;
  for (const auto& [head, logits] : all) {
    // To a local head the token itself is the exception, not part of the spread.
    const double std = moments(std::span(logits).first(logits.size() - 1)).std;
    result.stds.push_back(std);
    if (head % 8 == 3) {
      result.peaked.push_back(std);
    } else if (head % 8 == 5) {
      result.own_weights.push_back(softmax(logits).back());
    } else {
      result.plain.push_back(std);
    }
  }
  return result;
}

constexpr std::int64_t kTokens = 128, kQueries = 8;

class PresetLogits : public ::testing::TestWithParam<const char*> {};

TEST_P(PresetLogits, LookLikeATrainedModels) {
  ModelConfig config = preset_of(GetParam()).config;
  // The largest models' statistics do not depend on these; their size would only cost time.
  config.mla.num_heads = std::min<std::int64_t>(config.mla.num_heads, 16);
  config.mla.hidden_size = std::min<std::int64_t>(config.mla.hidden_size, 512);
  config.hidden_size = config.mla.hidden_size;
  const LayerMemory layer = make(config, 0, 0, DType::f32);
  const LogitStatistics s = statistics(measure_logits(config, layer, kTokens, kQueries));
  EXPECT_GE(mean(s.stds), 3.0);
  EXPECT_LE(mean(s.stds), 6.0);
  EXPECT_GT(mean(s.peaked), 1.25 * mean(s.plain));
  EXPECT_GT(mean(s.own_weights), 0.25);

  // The largest latent channels stand out from the rest.
  std::vector<double> norm = test::to_doubles(layer.tensors.mla.kv_a_layernorm);
  std::sort(norm.begin(), norm.end());
  EXPECT_GT(norm.back(), 4 * norm[norm.size() / 2]);
}

class GqaPresetLogits : public ::testing::TestWithParam<const char*> {};

TEST_P(GqaPresetLogits, LookLikeATrainedModels) {
  ModelConfig config = preset_of(GetParam()).config;
  const std::int64_t group_size = config.gqa.num_heads / config.gqa.num_kv_heads;
  config.gqa.num_kv_heads = std::max<std::int64_t>(8 / group_size, 1);
  config.gqa.num_heads = config.gqa.num_kv_heads * group_size;
  config.gqa.hidden_size = config.hidden_size = 256;
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const auto at = std::find(config.layer_group.begin(), config.layer_group.end(), g);
    const LayerMemory layer = make(config, 0, at - config.layer_group.begin(), DType::f32);
    const LogitStatistics s =
        statistics(measure_gqa_logits(config, layer, config.groups[g], kTokens, kQueries));
    EXPECT_GE(mean(s.stds), 2.8);
    EXPECT_LE(mean(s.stds), 6.0);
    EXPECT_GT(mean(s.own_weights), 0.25);
    // Norms leave all heads alike.
    if (config.qk_norm == QkNorm::none) {
      EXPECT_GT(mean(s.peaked), 1.2 * mean(s.plain));
    }
  }
}

std::string preset_name(const ::testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Presets, PresetLogits,
                         ::testing::Values("deepseek-v2", "deepseek-v2-lite", "deepseek-v3",
                                           "kimi-k2", "minicpm3-4b", "glm-4.7-flash"),
                         preset_name);
INSTANTIATE_TEST_SUITE_P(Presets, GqaPresetLogits,
                         ::testing::Values("gpt-oss-20b", "llama-2-7b", "llama-3-8b", "qwen2-7b",
                                           "qwen3-8b", "mistral-7b", "gemma-3-4b"),
                         preset_name);

}  // namespace
}  // namespace fovea
