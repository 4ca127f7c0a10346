// Absorbed weights in FP8 and FP4: results by the formula, memory, new values, and what is refused.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "fovea/error.h"
#include "layers/mla_world.h"

namespace fovea {
namespace {

using test::LayerShape;
using test::LayerWeights;
using test::World;
using test::WorldOptions;

constexpr AbsorbedProducts kRounded[] = {AbsorbedProducts::fp8_blocks, AbsorbedProducts::fp8,
                                         AbsorbedProducts::mxfp4};

/// Blocks that are not square, several in each head.
LayerShape shape_in_blocks() {
  return {.heads = 3,
          .q_lora = 40,
          .latent = 96,
          .nope = 32,
          .rope = 8,
          .value = 64,
          .hidden = 80,
          .fp8 = WeightGroups{32, 48}};
}

/// Decodes beside prefills with and without context.
void serve(World& world) {
  world.run({{0, 30}});
  world.run({{0, 1}, {1, 9}});
  world.run({{1, 1}, {0, 5}, {2, 6}});
  world.run({{0, 1}, {1, 1}, {2, 1}});
}
const std::vector<std::int32_t> kLengths = {37, 11, 7};

WorldOptions options_of(AbsorbedProducts products) {
  WorldOptions options{.shape = shape_in_blocks(), .absorbed_products = products};
  // An input near the border of two codes may fall on either side; not rounding at all is off by
  // some hundredths.
  if (products != AbsorbedProducts::mxfp4) options.output_limit = 3e-3;
  return options;
}

TEST(AbsorbedProducts, EqualTheFormula) {  // F031, F171
  for (const AbsorbedProducts products : kRounded) {
    SCOPED_TRACE(static_cast<int>(products));
    WorldOptions options = options_of(products);
    World world(options, kLengths);
    serve(world);
    options.q_scale = 0.03f;
    options.kv_format = "fp8_e4m3";
    options.kv_scale = 0.0137f;
    options.output_limit = 5e-3;
    World with_fp8_queries(options, kLengths);
    serve(with_fp8_queries);
  }
}

TEST(AbsorbedProducts, RoundInSmallDtypesToo) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const AbsorbedProducts products : kRounded) {
      WorldOptions options = options_of(products);
      options.dtype = dtype;
      options.output_limit = 0.04;  // Many inputs fall on the other side.
      World world(options, kLengths);
      serve(world);
    }
  }
}

TEST(AbsorbedProducts, BlocksOfDeepSeek) {
  World world({.shape = {.heads = 2,
                         .latent = 512,
                         .nope = 128,
                         .rope = 64,
                         .value = 128,
                         .hidden = 64,
                         .fp8 = WeightGroups{128, 128}},
               .absorbed_products = AbsorbedProducts::fp8_blocks,
               .output_limit = 3e-3},
              {12, 5});
  world.run({{0, 9}});
  world.run({{0, 1}, {1, 4}});
  world.run({{0, 1}, {1, 1}});
}

TEST(AbsorbedProducts, RoundOnlyByRequestAndOnlyDecodes) {  // B218
  EXPECT_EQ(AbsorbedProducts::dense, MlaOptions{}.absorbed_products);
  for (const AbsorbedProducts products : kRounded) {
    World rounded(options_of(products), {30});
    World exact(options_of(AbsorbedProducts::dense), {30});
    for (World* world : {&rounded, &exact}) world->run({{0, 20}});
    EXPECT_EQ(rounded.outputs(0), exact.outputs(0));
    for (World* world : {&rounded, &exact}) world->run({{0, 1}});
    EXPECT_NE(rounded.outputs(0), exact.outputs(0));
    EXPECT_LT(rounded.layer().weight_bytes(), exact.layer().weight_bytes());
  }
}

TEST(AbsorbedProducts, ReloadTakesNewValues) {
  for (const AbsorbedProducts products : kRounded) {
    World world(options_of(products), kLengths);
    const LayerWeights other(shape_in_blocks(), DType::f32, 7);
    world.layer().reload(other.views());
    const oracle::Rotary rotary = world.weights().oracle().rotary;
    world.weights().take_values_of(other);
    world.weights().oracle().rotary = rotary;
    serve(world);
  }
}

/// Rows [N * (P + V), C] per head as all heads' P rows, then all heads' V rows.
Tensor grouped(const TensorView& per_head, std::int64_t heads, std::int64_t p, std::int64_t v) {
  Tensor result = Tensor::empty(per_head.dtype, {per_head.shape[0], per_head.shape[1]});
  const TensorView from = per_head.split(0, heads, p + v), to = result;
  copy(from.slice(1, 0, p), to.slice(0, 0, heads * p).split(0, heads, p));
  copy(from.slice(1, p, p + v), to.slice(0, heads * p, heads * (p + v)).split(0, heads, v));
  return result;
}

TEST(AbsorbedProducts, BlocksOfGroupedColumns) {
  const LayerShape shape = shape_in_blocks();
  World world(options_of(AbsorbedProducts::fp8_blocks), kLengths);
  MlaWeights weights = world.weights().views();
  const Tensor codes = grouped(weights.kv_b_proj, shape.heads, shape.nope, shape.value);
  const Tensor scale = grouped(weights.kv_b_proj_scale.scale, shape.heads,
                               shape.nope / shape.fp8->out, shape.value / shape.fp8->out);
  weights.kv_b_proj = codes;
  weights.kv_b_proj_scale.scale = scale;
  weights.kv_b_order = KvBOrder::grouped;
  world.layer().reload(weights);
  serve(world);
}

TEST(AbsorbedProducts, WhatDoesNotFitIsNamed) {  // F171, F357
  const auto refused = [](LayerShape shape, const MlaOptions& options, const char* part) {
    const LayerWeights weights(shape, DType::f32, 1);
    try {
      const MlaLayer layer(shape.dims(), weights.views(), nullptr, options);
      ADD_FAILURE() << "was taken, must say " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  const MlaOptions blocks{.absorbed_products = AbsorbedProducts::fp8_blocks};
  LayerShape shape = shape_in_blocks();
  shape.nope = 16;
  refused(shape, blocks, "qk_nope_head_dim is 16, and must be a multiple of 32");
  refused(shape, {.absorbed_products = AbsorbedProducts::mxfp4}, "whole groups of 32");
  shape = shape_in_blocks();
  shape.value = 40;
  refused(shape, blocks, "v_head_dim is 40");
  shape = shape_in_blocks();
  shape.latent = 64;
  refused(shape, blocks, "kv_lora_rank is 64, and must be a multiple of 48");
  shape.fp8 = WeightGroups{1, 0};
  refused(shape, blocks, "kv_b_proj is f8e4m3fn in groups of [1, 0]");
  shape.fp8 = {};
  refused(shape, blocks, "kv_b_proj is f32");
  for (const AbsorbedProducts products : kRounded) {
    refused(shape_in_blocks(),
            {.absorption = MlaAbsorption::full, .absorbed_products = products},
            "absorption is full");
  }
}

}  // namespace
}  // namespace fovea
