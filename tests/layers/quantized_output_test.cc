// Layers that end in a quantised output: the bits of the op behind attention, on every path.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "layers/gqa_world.h"
#include "layers/mla_world.h"

namespace fovea {
namespace {

using test::Extend;
using test::GqaWorld;
using test::PaddedTensor;
using test::World;

constexpr std::int64_t kHeads = 4, kValue = 64, kWidth = kHeads * kValue;

/// One output of each kind for some rows, and how it is asked for.
class Outputs {
 public:
  explicit Outputs(std::int64_t rows)
      : fp8_(DType::f8e4m3fn, {rows, kWidth}),
        fp4_(DType::u8, {rows, kWidth / 2}),
        groups_of_128_(DType::f32, {kWidth / 128, (rows + 3) / 4 * 4}),
        groups_of_64_(DType::f8e8m0, {rows, kWidth / 64}),
        tiles_(Tensor::empty(DType::f8e4m3fn, {(rows + 127) / 128 * 128, kWidth / 16})) {
    const TensorView aligned = groups_of_128_.view().slice(1, 0, rows).transpose(0, 1);
    kinds = {{.out = fp8_, .block_scale = {}, .scale = 0.01f},
             {.out = fp8_, .block_scale = {}, .inv_scale = 8.f},
             {.out = fp8_, .block_scale = aligned},
             {.out = fp8_, .block_scale = groups_of_64_, .power_of_two_scales = true},
             {.out = fp4_, .block_scale = tiles_, .scale = 0.001f},
             {.out = fp4_, .block_scale = tiles_, .inv_scale = 900.f}};
  }
  void poison() const {
    for (const PaddedTensor* tensor : all()) test::poison(*tensor);
    test::poison_bytes(tiles_.view().data, tiles_.nbytes());
  }
  bool untouched() const {
    for (const PaddedTensor* tensor : all()) {
      if (!tensor->padding_untouched()) return false;
    }
    return true;
  }
  /// All bytes of all outputs.
  std::string bytes() const {
    std::string result;
    for (const PaddedTensor* tensor : all()) {
      const TensorView view = tensor->view();
      for (std::int64_t row = 0; row < view.shape[0]; ++row) {
        const TensorView part = view.select(0, row);
        result.append(static_cast<const char*>(part.data),
                      static_cast<std::size_t>(bytes_of(part.dtype, part.shape[0])));
      }
    }
    return result.append(static_cast<const char*>(tiles_.view().data),
                         static_cast<std::size_t>(tiles_.nbytes()));
  }

  std::vector<QuantizedOutput> kinds;

 private:
  std::vector<const PaddedTensor*> all() const {
    return {&fp8_, &fp4_, &groups_of_128_, &groups_of_64_};
  }

  PaddedTensor fp8_, fp4_, groups_of_128_, groups_of_64_;
  Tensor tiles_;
};

/// Runs a layer whose o_proj is the identity both ways, and so finds what attention gave.
template <class World>
void run_both_ways(World& world, const std::vector<Extend>& extends) {
  auto s = world.prepare(extends);
  s.step.plan = &s.plan;
  OpContext ctx = world.context();
  Workspace workspace;
  workspace.reserve(world.layer().workspace_bytes(ctx, s.plan));
  ctx.workspace = &workspace;
  test::poison(workspace);
  world.layer()(ctx, *s.hidden, *s.out, s.step, world.cache());
  const TensorView attended = s.out->view().slice(0, 0, s.plan.num_actual_tokens);
  const Outputs expected(s.rows()), got(s.rows());
  for (std::size_t kind = 0; kind < got.kinds.size(); ++kind) {
    expected.poison();
    got.poison();
    quantize_output(ctx, {attended, expected.kinds[kind]});
    test::poison(workspace);
    world.layer()(ctx, *s.hidden, got.kinds[kind], s.step, world.cache());
    EXPECT_EQ(expected.bytes(), got.bytes()) << "kind " << kind;
    EXPECT_TRUE(got.untouched()) << "kind " << kind;
  }
  EXPECT_EQ(workspace.used(), 0);
  world.run(extends);  // The same step against the oracle.
}

/// Prefill, decode beside prefill, context in several chunks, decodes.
template <class World>
void serve(World& world) {
  run_both_ways(world, {{0, 21}});
  run_both_ways(world, {{0, 1}, {1, 9}});
  run_both_ways(world, {{1, 1}, {0, 7}, {2, 5}, {3, 30}});
  run_both_ways(world, {{0, 1}, {1, 1}, {2, 1}});
}
const std::vector<std::int32_t> kLengths = {30, 11, 6, 30};

Tensor identity(DType dtype) {
  Tensor matrix = Tensor::zeros(dtype, {kWidth, kWidth});
  for (std::int64_t i = 0; i < kWidth; ++i) {
    test::assign(matrix.view().slice(0, i, i + 1).slice(1, i, i + 1), std::vector{1.});
  }
  return matrix;
}

void set_identity(World& world, const Tensor& o_proj) {
  MlaWeights weights = world.weights().views();
  weights.o_proj = o_proj;
  world.layer().reload(weights);
  world.weights().oracle().o_proj = test::to_doubles(o_proj);
}

test::WorldOptions mla_options(DType dtype) {
  test::WorldOptions options{
      .shape = {.heads = kHeads, .value = kValue, .hidden = kWidth}, .dtype = dtype};
  options.workspace_rows = 16;
  return options;
}

test::GqaOptions gqa_options(DType dtype) {
  return {.shape = {.dims = {.hidden_size = kWidth,
                             .num_heads = kHeads,
                             .num_kv_heads = 2,
                             .head_dim = 16,
                             .v_head_dim = kValue}},
          .dtype = dtype};
}

class QuantizedOutputs : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, QuantizedOutputs, testing::Values(DType::f32, DType::bf16),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

TEST_P(QuantizedOutputs, LatentLayersHaveTheBitsOfTheOp) {  // F133, F176 to F182
  for (const char* kv_format : {"", "int8_per_token"}) {
    test::WorldOptions options = mla_options(GetParam());
    options.kv_format = kv_format;
    World world(options, kLengths);
    set_identity(world, identity(GetParam()));
    serve(world);
  }
}

TEST_P(QuantizedOutputs, GroupedQueryLayersHaveTheBitsOfTheOp) {
  GqaWorld world(gqa_options(GetParam()), kLengths);
  const Tensor o_proj = identity(GetParam());
  AttentionWeights weights = world.weights().views();
  weights.o_proj = o_proj;
  world.layer().reload(weights);
  world.weights().twins()[0].o_proj = test::to_doubles(o_proj);
  serve(world);
}

/// Every way to be no kind: said by layers before anything is written.
template <class World>
void refuse_what_is_no_kind(World& world) {
  auto s = world.prepare({{0, 5}});
  s.step.plan = &s.plan;
  OpContext ctx = world.context();
  Workspace workspace;
  workspace.reserve(world.layer().workspace_bytes(ctx, s.plan));
  ctx.workspace = &workspace;
  const Outputs outputs(s.rows());
  outputs.poison();
  const std::string before = outputs.bytes();
  const auto refused = [&](const char* part, const QuantizedOutput& output) {
    try {
      world.layer()(ctx, *s.hidden, output, s.step, world.cache());
      ADD_FAILURE() << "was taken, must say " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_EQ(before, outputs.bytes());
  };
  const TensorView fp8 = outputs.kinds[0].out, fp4 = outputs.kinds[4].out;
  const TensorView groups = outputs.kinds[2].block_scale, tiles = outputs.kinds[4].block_scale;
  refused("neither block_scale nor scale", {.out = fp8, .block_scale = {}});
  refused("at most one", {.out = fp8, .block_scale = {}, .scale = 1.f, .inv_scale = 1.f});
  refused("scale is -1", {.out = fp8, .block_scale = {}, .scale = -1.f});
  refused("inverse must be finite", {.out = fp8, .block_scale = {}, .inv_scale = 1e-40f});
  refused("each group has its own", {.out = fp8, .block_scale = groups, .scale = 1.f});
  refused("1 groups for output_dim = 256", {.out = fp8, .block_scale = groups.slice(1, 0, 1)});
  refused("mxfp4", {.out = fp4, .block_scale = tiles});
  refused("u8 with block_scale of f32", {.out = fp4, .block_scale = groups, .scale = 1.f});
  refused("out is", {.out = fp8.slice(0, 0, 3), .block_scale = {}, .scale = 1.f});
  refused("block_scale is", {.out = fp4, .block_scale = tiles.slice(1, 0, 4), .scale = 1.f});
}

TEST(QuantizedOutputRefusals, LayersSayThemBeforeAnythingIsWritten) {  // F173 to F175
  World latent(mla_options(DType::f32), {5});
  refuse_what_is_no_kind(latent);
  EXPECT_TRUE(test::still_poisoned(latent.cache().slot(0), latent.cache().format().row_bytes()));
  GqaWorld grouped(gqa_options(DType::f32), {5});
  refuse_what_is_no_kind(grouped);
}

TEST(QuantizedOutputRefusals, FullAbsorptionHasNoSuchRows) {
  test::WorldOptions options = mla_options(DType::f32);
  options.absorption = MlaAbsorption::full;
  World world(options, {5});
  World::Step s = world.prepare({{0, 5}});
  s.step.plan = &s.plan;
  const Outputs outputs(s.rows());
  try {
    world.layer()(world.context(), *s.hidden, outputs.kinds[0], s.step, world.cache());
    ADD_FAILURE() << "was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(std::string(error.what()).find("absorption full"), std::string::npos);
  }
}

template <class World, class Cache>
void profile(World& world, const Cache& no_cache) {
  const PaddedTensor hidden(DType::f32, {7, kWidth});
  const Outputs outputs(7);
  OpContext ctx = world.context();
  Workspace workspace;
  ctx.workspace = &workspace;
  AttentionStep step;
  step.profile_limits = {
      .max_tokens = 100, .max_num_seqs = 10, .workspace_rows = 64, .max_seq_len = 500};
  for (const QuantizedOutput& output : outputs.kinds) {
    outputs.poison();
    world.layer()(ctx, hidden, output, step, no_cache);
    EXPECT_TRUE(outputs.untouched());
    for (std::int64_t row = 0; row < 7; ++row) {
      const TensorView codes = output.out.select(0, row);
      const auto* bytes = static_cast<const char*>(codes.data);
      EXPECT_EQ(std::string(bytes, static_cast<std::size_t>(codes.shape[0])),
                std::string(static_cast<std::size_t>(codes.shape[0]), 0));
    }
  }
  EXPECT_EQ(workspace.peak(), world.layer().workspace_bytes(ctx, step.profile_limits));
}

TEST(QuantizedOutputProfile, GivesZeros) {  // F187
  World latent(mla_options(DType::f32), {5});
  profile(latent, PagedKvCache());
  GqaWorld grouped(gqa_options(DType::f32), {5});
  profile(grouped, GqaCache());
}

}  // namespace
}  // namespace fovea
