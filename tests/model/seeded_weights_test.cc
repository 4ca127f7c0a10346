#include "model/seeded_weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "fovea/error.h"
#include "model/moments.h"
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
  EXPECT_EQ(fingerprint(normed.tensors.gqa.q_norm), 0x57b2efbed778e7a9u);
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

TEST(SeededWeights, ValuesAreAboutNormal) {
  const Tensor row = Tensor::empty(DType::f32, {100000});
  token_hidden_state(0, 0, row);
  const std::vector<double> x = test::to_doubles(row);
  const test::Moments m = test::moments(x);
  EXPECT_NEAR(m.mean, 0, 0.015);
  EXPECT_NEAR(m.std, 1, 0.01);
  EXPECT_LT(m.largest, 3.47);
  double fourth = 0;
  for (const double v : x) fourth += v * v * v * v / 1e5;
  EXPECT_NEAR(fourth, 2.7, 0.1);  // 3 - 1.2 / 4 for the sum of four uniforms.
}

}  // namespace
}  // namespace fovea
