// Layers whose projections are FP8: results, memory, new values, and what is refused.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "layers/gqa_world.h"
#include "layers/mla_world.h"

namespace fovea {
namespace {

using test::GqaOptions;
using test::GqaShape;
using test::GqaWorld;
using test::LayerShape;
using test::LayerWeights;
using test::World;
using test::WorldOptions;

/// Per tensor, per channel, square and other blocks; several and cut ones in each projection.
constexpr WeightGroups kGroups[] = {{0, 0}, {1, 0}, {32, 32}, {48, 20}, {16, 0}};

/// q_a_proj ends in the middle of a block, and so does kv_a_proj.
LayerShape shape_with(const WeightGroups& groups) {
  return {.heads = 3,
          .q_lora = 40,
          .latent = 48,
          .nope = 16,
          .rope = 8,
          .value = 24,
          .hidden = 80,
          .biases = true,
          .fp8 = groups};
}

std::string text_of(const WeightGroups& groups) {
  return "groups of " + std::to_string(groups.out) + ", " + std::to_string(groups.in);
}

/// Prefill, context in chunks, decode, and all of it mixed.
void serve(World& world) {
  world.run({{0, 70}});
  world.run({{0, 1}, {1, 9}});
  world.run({{1, 1}, {0, 5}, {2, 6}});
}
const std::vector<std::int32_t> kLengths = {76, 10, 6};

std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

testing::AssertionResult mentions(const std::string& text, std::vector<std::string> parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) {
      return testing::AssertionFailure() << "'" << part << "' is not in: " << text;
    }
  }
  return testing::AssertionSuccess();
}

class Fp8Mla : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, Fp8Mla, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

TEST_P(Fp8Mla, EqualsTheOracleOnTheDecodedWeights) {
  for (const WeightGroups& groups : kGroups) {
    for (MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
      SCOPED_TRACE(text_of(groups) + (absorption == MlaAbsorption::full ? " full" : ""));
      World world({.shape = shape_with(groups), .dtype = GetParam(), .absorption = absorption},
                  kLengths);
      EXPECT_EQ(world.layer().dtype(), GetParam());
      serve(world);
    }
  }
}

TEST_P(Fp8Mla, SomeProjectionsMayBeDense) {
  using Names = std::vector<std::string>;
  for (const Names& dense : {Names{"q_a_proj"}, Names{"kv_a_proj"}, Names{"kv_b_proj"},
                             Names{"q_b_proj", "o_proj"}, Names{"q_a_proj", "kv_a_proj"}}) {
    for (MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
      SCOPED_TRACE(dense.front());
      WorldOptions options{
          .shape = shape_with({32, 32}), .dtype = GetParam(), .absorption = absorption};
      options.shape.dense = dense;
      World world(options, kLengths);
      serve(world);
    }
  }
}

TEST_P(Fp8Mla, RequantisedAbsorptionIsWithinTheErrorOfFp8) {  // F043, F044
  for (const WeightGroups& groups : kGroups) {
    SCOPED_TRACE(text_of(groups));
    WorldOptions options{.shape = shape_with(groups),
                         .dtype = GetParam(),
                         .absorption = MlaAbsorption::full,
                         .requantize_absorbed = true,
                         // Two products with weights within 2^-4, whose errors partly cancel.
                         .output_limit = 0x1p-4};
    World world(options, kLengths);
    serve(world);
    options.requantize_absorbed = false;
    options.output_limit = 0;
    World exact(options, kLengths);
    serve(exact);
    EXPECT_NE(world.outputs(0), exact.outputs(0));
    EXPECT_LT(world.layer().weight_bytes(), exact.layer().weight_bytes());
  }
}

/// Dims of whole panels, so that bytes can be counted.
LayerShape counted_shape() {
  return {
      .heads = 2, .q_lora = 32, .latent = 48, .nope = 16, .rope = 16, .value = 16, .hidden = 64};
}

TEST(MlaLayerFp8, ProjectionsTakeAByteForEachWeight) {
  LayerShape shape = counted_shape();
  shape.fp8 = WeightGroups{0, 0};
  const LayerWeights weights(shape, DType::bf16, 1);
  const MlaLayer layer(shape.dims(), weights.views(), nullptr, {.linear = LinearBackend::plain});
  const std::int64_t a = 32 + 64, q_b = 2 * 32, kv_b = 2 * 32, o = 64;
  const std::int64_t codes = a * 64 + q_b * 32 + kv_b * 48 + o * 32;
  const std::int64_t scales = 4 * (a + q_b + kv_b + o), norms = 2 * (32 + 48);
  const std::int64_t absorbed = 2 * 2 * (16 * 48 + 48 * 16);
  EXPECT_EQ(codes + scales + norms + absorbed, layer.weight_bytes());
}

TEST(MlaLayerFp8, ReloadTakesNewValues) {
  for (MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
    WorldOptions options{.shape = shape_with({32, 32}), .absorption = absorption};
    World world(options, kLengths);
    const LayerWeights other(options.shape, DType::f32, 7);
    world.layer().reload(other.views());
    const oracle::Rotary rotary = world.weights().oracle().rotary;
    world.weights().take_values_of(other);
    world.weights().oracle().rotary = rotary;
    serve(world);
  }
}

TEST(MlaLayerFp8, ReloadRefusesOtherFormsAndChangesNothing) {
  World world({.shape = shape_with({32, 32})}, kLengths);
  const LayerWeights rows(shape_with({1, 0}), DType::f32, 7);
  LayerShape shape = shape_with({32, 32});
  shape.dense = {"o_proj"};
  const LayerWeights mixed(shape, DType::f32, 7);
  EXPECT_TRUE(mentions(refusal([&] { world.layer().reload(rows.views()); }), {"groups of"}));
  EXPECT_TRUE(mentions(refusal([&] { world.layer().reload(mixed.views()); }),
                       {"o_proj is f32", "was f8e4m3fn"}));
  serve(world);
}

TEST(MlaLayerFp8, WhatDoesNotFitIsNamed) {
  const LayerShape shape = shape_with({32, 32});
  const LayerWeights weights(shape, DType::f32, 1);
  const auto error_of = [&](const std::function<void(MlaWeights&)>& change,
                            const MlaOptions& options = {}) {
    MlaWeights changed = weights.views();
    change(changed);
    return refusal([&] { const MlaLayer layer(shape.dims(), changed, nullptr, options); });
  };
  EXPECT_TRUE(mentions(error_of([](MlaWeights& w) { w.o_proj_scale = {}; }),
                       {"o_proj is f8e4m3fn", "o_proj_scale is absent"}));
  EXPECT_TRUE(mentions(error_of([](MlaWeights& w) {
                         w.kv_b_proj_scale.groups = {32, 0};
                       }),
                       {"kv_b_proj: scale is", "[4, 1]"}));
  EXPECT_TRUE(
      mentions(error_of([](MlaWeights& w) { w.q_b_proj.dtype = DType::u8; }), {"q_b_proj is u8"}));
  EXPECT_TRUE(mentions(error_of([](MlaWeights&) {}, {.dtype = DType::bf16}), {"q_a_bias is f32"}));
  EXPECT_TRUE(mentions(error_of([](MlaWeights&) {}, {.dtype = DType::u8}), {"dtype is u8"}));
  const Tensor dense = Tensor::zeros(DType::f32, {80, 72});
  EXPECT_TRUE(mentions(error_of([&](MlaWeights& w) { w.o_proj = dense; }),
                       {"o_proj_scale is there", "o_proj is f32"}));
  // Parts of one product whose groups have two widths.
  const Tensor codes = Tensor::zeros(DType::f8e4m3fn, {40, 80});
  const Tensor scale = Tensor::zeros(DType::f32, {2, 2});
  EXPECT_TRUE(mentions(error_of([&](MlaWeights& w) {
                         w.q_a_proj = codes;
                         w.q_a_proj_scale = {scale, {32, 64}};
                       }),
                       {"q_a_proj has groups of 64", "kv_a_proj of 32"}));
}

TEST(MlaLayerFp8, RequantisationNeedsFullAbsorptionAndEqualGroups) {  // F039, F042
  LayerShape shape = shape_with({32, 32});
  const LayerWeights weights(shape, DType::f32, 1);
  const auto error_of = [&](const MlaWeights& w, MlaAbsorption absorption) {
    return refusal([&] {
      const MlaLayer layer(shape.dims(), w, nullptr,
                           {.absorption = absorption, .requantize_absorbed = true});
    });
  };
  EXPECT_TRUE(mentions(error_of(weights.views(), MlaAbsorption::two_step),
                       {"requantize_absorbed", "two_step"}));
  const LayerWeights rows(shape_with({1, 0}), DType::f32, 1);
  MlaWeights changed = weights.views();
  changed.o_proj = rows.views().o_proj;
  changed.o_proj_scale = rows.views().o_proj_scale;
  EXPECT_TRUE(mentions(error_of(changed, MlaAbsorption::full),
                       {"o_proj has groups of [1, 0]", "[32, 32] like q_b_proj"}));
  shape.dense = {"kv_b_proj"};
  const LayerWeights mixed(shape, DType::f32, 1);
  EXPECT_TRUE(mentions(error_of(mixed.views(), MlaAbsorption::full), {"kv_b_proj is f32"}));
}

/// Prefill, decode and both.
void serve(GqaWorld& world) {
  world.run({{0, 20}});
  world.run({{0, 1}, {1, 9}});
  world.run({{1, 1}, {0, 5}, {2, 6}});
}

TEST(Fp8Attention, EqualsTheOracleOnTheDecodedWeights) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const WeightGroups& groups : kGroups) {
      for (bool fused : {false, true}) {
        SCOPED_TRACE(text_of(groups) + (fused ? " fused" : ""));
        const GqaOptions options{
            .shape = {.fused_weights = fused, .biases = true, .fp8 = groups, .adapters = fused * 2},
            .dtype = dtype};
        GqaWorld world(options, {26, 10, 6});
        EXPECT_EQ(world.layer().dtype(), dtype);
        serve(world);
      }
    }
    GqaWorld mixed({.shape = {.fp8 = WeightGroups{32, 16}, .dense_v = true}, .dtype = dtype},
                   {26, 10, 6});
    serve(mixed);
  }
}

TEST(Fp8Attention, ReloadTakesNewValues) {
  const GqaShape shape{.fp8 = WeightGroups{32, 16}};
  GqaWorld world({.shape = shape}, {26, 10, 6});
  const test::GqaLayerWeights other(shape, DType::f32, 7);
  world.layer().reload(other.views());
  const oracle::Rotary rotary = world.weights().twin(-1).rotary;
  world.weights().twins()[0] = other.twin(-1);
  world.weights().twins()[0].rotary = rotary;
  serve(world);
  const test::GqaLayerWeights dense(GqaShape{}, DType::f32, 7);
  EXPECT_TRUE(mentions(refusal([&] { world.layer().reload(dense.views()); }),
                       {"q_proj is f32", "was f8e4m3fn"}));
}

TEST(Fp8Attention, WhatDoesNotFitIsNamed) {
  const GqaShape shape{.fp8 = WeightGroups{32, 16}};
  const test::GqaLayerWeights weights(shape, DType::f32, 1);
  const auto error_of = [&](const std::function<void(AttentionWeights&)>& change,
                            std::optional<DType> dtype = DType::f32) {
    AttentionWeights changed = weights.views();
    change(changed);
    return refusal(
        [&] { const AttentionLayer layer(shape.dims, changed, nullptr, {.dtype = dtype}); });
  };
  EXPECT_TRUE(mentions(error_of([](AttentionWeights&) {}, std::nullopt), {"options.dtype"}));
  EXPECT_TRUE(mentions(error_of([](AttentionWeights& w) { w.k_proj_scale = {}; }),
                       {"k_proj is f8e4m3fn", "k_proj_scale is absent"}));
  EXPECT_TRUE(mentions(error_of([](AttentionWeights& w) { w.qkv_proj_scale = w.q_proj_scale; }),
                       {"or qkv_proj_scale, but must not be"}));
}

}  // namespace
}  // namespace fovea
