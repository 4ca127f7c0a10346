#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fovea/error.h"
#include "layers/mla_world.h"

namespace fovea {
namespace {

using test::Extend;
using test::LayerShape;
using test::World;
using test::WorldOptions;

struct NamedShape {
  const char* name;
  LayerShape shape;
  friend void PrintTo(const NamedShape& named, std::ostream* out) { *out << named.name; }
};

const NamedShape kShapes[] = {
    {"tiny", {}},
    {"tiny_q_lora", {.q_lora = 24, .biases = true}},
    {"deepseek",
     {.heads = 16, .latent = 512, .nope = 128, .rope = 64, .value = 128, .hidden = 128}},
    {"glm",
     {.heads = 20,
      .q_lora = 96,
      .latent = 128,
      .nope = 192,
      .rope = 64,
      .value = 256,
      .hidden = 128}},
    {"minicpm",
     {.heads = 5,
      .q_lora = 64,
      .latent = 256,
      .nope = 64,
      .rope = 32,
      .value = 64,
      .hidden = 96,
      .biases = true}},
    {"one_head", {.heads = 1, .latent = 24, .nope = 6, .rope = 2, .value = 10, .hidden = 64}},
};

class MlaLayerTest : public testing::TestWithParam<std::tuple<NamedShape, DType>> {
 protected:
  WorldOptions options() const {
    WorldOptions options;
    options.shape = std::get<0>(GetParam()).shape;
    options.dtype = std::get<1>(GetParam());
    return options;
  }
};

/// Prefills, chunks and decodes mixed: [decode.., prefill..] in every step.
void serve_mixed(World& world) {
  world.run({{0, 21}});                          // One prefill, no context.
  world.run({{0, 1}, {1, 9}});                   // Decode and a first prefill.
  world.run({{0, 1}, {1, 1}});                   // Decodes only.
  world.run({{1, 1}, {0, 7}, {2, 5}, {3, 30}});  // Context in one, none in two.
  world.run({{1, 1}, {2, 1}, {0, 3}, {3, 12}});  // Contexts of different lengths.
}
const std::vector<std::int32_t> kMixedLengths = {33, 13, 6, 42};

/// The same kinds of steps, for dims at which the oracle is slow.
void serve_briefly(World& world) {
  world.run({{0, 9}});
  world.run({{0, 1}, {1, 6}});
  world.run({{1, 1}, {0, 5}, {2, 3}});
}

void serve(World& world, const LayerShape& shape) {
  shape.heads* shape.latent < 1000 ? serve_mixed(world) : serve_briefly(world);
}

TEST_P(MlaLayerTest, MixedBatches) {
  World world(options(), kMixedLengths);
  serve(world, options().shape);
}

TEST_P(MlaLayerTest, FullAbsorption) {
  WorldOptions full = options();
  full.absorption = MlaAbsorption::full;
  World world(full, kMixedLengths);
  serve(world, full.shape);
}

std::string name_of_case(const testing::TestParamInfo<std::tuple<NamedShape, DType>>& instance) {
  return std::string(std::get<0>(instance.param).name) + "_" +
         std::string(name_of(std::get<1>(instance.param)));
}

INSTANTIATE_TEST_SUITE_P(Shapes, MlaLayerTest,
                         testing::Combine(testing::ValuesIn(kShapes),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)),
                         name_of_case);

TEST(MlaLayer, ContextInChunksOfOneBlockAndMore) {
  for (ContextPlanKind kind : {ContextPlanKind::packed, ContextPlanKind::equal}) {
    for (std::int64_t rows : {48, 64, 100, 4096}) {
      SCOPED_TRACE(std::to_string(rows) + (kind == ContextPlanKind::packed ? " packed" : " equal"));
      WorldOptions options;
      options.workspace_rows = rows;
      options.context_plan = kind;
      World world(options, {130, 20, 60, 9});
      world.run({{0, 100}, {1, 3}, {2, 50}});
      world.run({{0, 25}, {1, 16}, {2, 9}, {3, 8}});  // Contexts 100, 3, 50 and 0.
      world.run({{3, 1}, {1, 1}, {2, 1}, {0, 5}});
    }
  }
  WorldOptions options;  // One block of one request at a time.
  options.workspace_rows = 16;
  World world(options, {90, 40});
  world.run({{0, 80}, {1, 20}});
  world.run({{0, 10}, {1, 20}});
}

TEST(MlaLayer, SeveralQueryTokensPerDecode) {
  for (QueryLenSupport support : {QueryLenSupport::uniform, QueryLenSupport::varlen}) {
    WorldOptions options;
    options.split = {.reorder_batch_threshold = 4, .support = support};
    for (MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
      options.absorption = absorption;
      World world(options, {40, 30, 50});
      world.run({{0, 30}, {1, 20}, {2, 5}});
      world.run({{0, 3}, {1, 3}, {2, 20}});
      if (support == QueryLenSupport::varlen) world.run({{1, 4}, {0, 2}, {2, 1}});
    }
  }
}

TEST(MlaLayer, WindowsChunksAndSinksOverContextChunks) {
  const AttentionVariant variants[] = {{},
                                       {.window_left = 9},
                                       {.window_left = 40},
                                       {.attention_chunk = 20},
                                       {.window_left = 25, .soft_cap = 2.f}};
  for (const AttentionVariant& variant : variants) {
    for (ContextPlanKind kind : {ContextPlanKind::packed, ContextPlanKind::equal}) {
      WorldOptions options;
      options.shape.sinks = true;
      options.variant = variant;
      options.context_plan = kind;
      options.workspace_rows = 64;
      World world(options, {130, 24, 60, 9});
      world.run({{0, 100}, {1, 3}, {2, 50}});
      world.run({{0, 25}, {1, 16}, {2, 8}, {3, 8}});  // Contexts 100, 3, 50 and 0.
      world.run({{3, 1}, {1, 1}, {2, 1}, {0, 4}});
      world.run({{0, 1}, {1, 1}, {2, 1}});
    }
  }
}

TEST(MlaLayer, DraftTreesStandAtTheirDepth) {
  // 0 - 1 - 2 and 0 - 3 - 4; a chain; both beside a prefill with context.
  const std::vector<std::uint64_t> tree = {0b1, 0b11, 0b111, 0b1001, 0b11001}, chain = {1, 3};
  for (std::int64_t window_left : {-1, 2}) {
    for (MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
      WorldOptions options;
      options.shape.sinks = true;
      options.variant.window_left = window_left;
      options.absorption = absorption;
      options.split = {.reorder_batch_threshold = 5, .support = QueryLenSupport::varlen};
      World world(options, {40, 30, 50});
      world.run({{0, 30}, {1, 20}, {2, 9}});
      world.run({{0, 5, tree}, {1, 2, chain}, {2, 11}});
    }
  }
}

TEST(MlaLayer, NormsSideBySideHaveTheBitsOfNormsInSequence) {
  // One thread norms in sequence, and so do all where there is little to do.
  for (DType dtype : {DType::f32, DType::bf16}) {
    std::vector<std::vector<double>> outputs;
    for (int threads : {1, 2, 5}) {
      WorldOptions options;
      options.dtype = dtype;
      options.shape.q_lora = 1024;
      options.shape.latent = 1024;
      options.linear = LinearBackend::plain;
      options.threads = threads;
      World world(options, {14});
      for (std::int32_t tokens : {9, 1, 4}) world.run({{0, tokens}});
      outputs.push_back(world.stored_rows(0));
    }
    EXPECT_EQ(outputs[0], outputs[1]);
    EXPECT_EQ(outputs[0], outputs[2]);
  }
}

TEST(MlaLayer, PrefillPathAndDecodePathAgree) {
  WorldOptions options;
  World as_decode(options, {40});
  options.split.treat_short_extends_as_decodes = false;
  options.all_prefilling = true;
  World as_prefill(options, {40});
  for (World* world : {&as_decode, &as_prefill}) world->run({{0, 33}});
  EXPECT_EQ(as_decode.plan_of({{0, 1}}).split.num_decodes, 1);
  EXPECT_EQ(as_prefill.plan_of({{0, 1}}).split.num_prefills, 1);
  for (int i = 0; i < 7; ++i) {
    for (World* world : {&as_decode, &as_prefill}) world->run({{0, 1}});
  }
  EXPECT_LT(test::worst_row_difference(as_decode.outputs(0), as_prefill.outputs(0), 48), 1e-5);
}

TEST(MlaLayer, GroupedAndPerHeadColumnsOfTheSameWeights) {
  for (MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
    WorldOptions options;
    options.absorption = absorption;
    options.order = KvBOrder::grouped;
    World world(options, kMixedLengths);  // The oracle has them per head.
    serve_mixed(world);
  }
}

TEST(MlaLayer, NothingIsRotatedWithoutARotary) {
  WorldOptions options;
  options.rotates = false;
  World world(options, kMixedLengths);
  serve_mixed(world);
}

TEST(MlaLayer, BothPairingsAndYarn) {
  for (RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    WorldOptions options;
    options.pairing = pairing;
    World plain(options, kMixedLengths);
    serve_mixed(plain);
    // Amplitude and softmax scale both differ from 1.
    options.yarn = YarnScaling{.factor = 40,
                               .original_max_position = 64,
                               .beta_fast = 4,
                               .beta_slow = 1,
                               .mscale = 1,
                               .mscale_all_dim = 0.5};
    World scaled(options, kMixedLengths);
    serve_mixed(scaled);
  }
}

TEST(MlaLayer, AsManyTokensAsHeads) {
  // [N, T] and [T, N] have one shape here.
  World world({}, {20, 12, 8});
  world.run({{0, 4}});
  world.run({{0, 4}});
  world.run({{1, 4}, {2, 4}, {0, 4}});
  world.run({{0, 2}, {1, 2}});
}

TEST(MlaLayer, PositionsOfTwoDimensions) {
  WorldOptions options;
  options.two_dim_positions = true;
  World world(options, kMixedLengths);
  serve_mixed(world);
}

TEST(MlaLayer, EveryLinearBackendAndEveryOpBackend) {
  for (const char* backend : {"cpu", "reference"}) {
    for (LinearBackend linear : {LinearBackend::plain, LinearBackend::onednn}) {
      for (DType dtype : {DType::f32, DType::bf16}) {
        WorldOptions options;
        options.backend = backend;
        options.linear = linear;
        options.dtype = dtype;
        try {
          World world(options, kMixedLengths);
          serve_mixed(world);
        } catch (const Error& error) {
          ASSERT_EQ(error.code(), ErrorCode::unsupported) << error.what();
        }
      }
    }
  }
}

TEST(MlaLayer, CacheOfAnotherDtype) {
  // Stored rows are rounded to bf16; what new tokens make of each other is not.
  WorldOptions options;
  options.kv_format = "bf16";
  World narrow(options, {40});
  narrow.run({{0, 20}});
  narrow.run({{0, 17}});
  options.dtype = DType::bf16;
  options.kv_format = "f32";
  World wide(options, kMixedLengths);
  serve_mixed(wide);
}

TEST(MlaLayer, ScaleFromTheLatentWidthIsFarOff) {
  LayerShape shape;
  test::LayerWeights weights(shape, DType::f32, 1);
  World world({}, {40});
  world.run({{0, 33}});
  const std::vector<double> rows = world.stored_rows(0);
  std::vector<std::int64_t> positions(33);
  std::iota(positions.begin(), positions.end(), 0);
  oracle::MlaWeights wrong = weights.oracle();
  wrong.sm_scale *= std::sqrt(static_cast<double>(shape.nope + shape.rope) /
                              static_cast<double>(shape.latent + shape.rope));
  const std::vector<double> off = oracle::mla_layer(wrong, world.hidden_of(0, 0, 33), positions,
                                                    rows, oracle::MlaForm::expanded);
  EXPECT_GT(test::worst_row_difference(world.outputs(0), off, shape.hidden), 0.05);
}

TEST(MlaLayer, SkippedSlotsAreNotStored) {
  World world({}, {20});
  world.run({{0, 10}});
  World::Step s = world.prepare({{0, 5}});
  s.step.plan = &s.plan;
  const TensorView skipped = s.slots.view().slice(0, 1, 2);
  const std::int64_t slot = *skipped.ptr<std::int64_t>();
  test::assign(skipped, std::vector<double>{-1});
  OpContext ctx = world.context();
  Workspace workspace;
  workspace.reserve(world.layer().workspace_bytes(ctx, s.plan));
  ctx.workspace = &workspace;
  world.layer()(ctx, *s.hidden, *s.out, s.step, world.cache());
  EXPECT_TRUE(test::still_poisoned(world.cache().slot(slot), world.cache().format().row_bytes()));
  // Without a mapping nothing is stored; new tokens still see each other.
  const std::vector<double> with_append = test::to_doubles(s.out->view().slice(0, 0, 5));
  World fresh({}, {20});
  fresh.run({{0, 10}});
  World::Step t = fresh.prepare({{0, 5}});
  t.step.plan = &t.plan;
  t.step.slot_mapping = {};
  fresh.layer()(ctx, *t.hidden, *t.out, t.step, fresh.cache());
  EXPECT_EQ(test::to_doubles(t.out->view().slice(0, 0, 5)), with_append);
  EXPECT_TRUE(test::still_poisoned(fresh.cache().slot(slot), fresh.cache().format().row_bytes()));
}

TEST(MlaLayer, ProfileRunTakesTheWorstStepAndGivesZeros) {
  World world({}, {20});
  test::PaddedTensor hidden(DType::f32, {7, 48}), out(DType::f32, {7, 48});
  OpContext ctx = world.context();
  Workspace workspace;
  ctx.workspace = &workspace;
  AttentionStep step;
  step.profile_limits = {
      .max_tokens = 100, .max_num_seqs = 10, .workspace_rows = 64, .max_seq_len = 500};
  world.layer()(ctx, hidden, out, step, PagedKvCache());
  EXPECT_EQ(test::to_doubles(out), std::vector<double>(7 * 48, 0.0));
  EXPECT_TRUE(out.padding_untouched());
  EXPECT_EQ(workspace.peak(), world.layer().workspace_bytes(ctx, step.profile_limits));
  EXPECT_EQ(workspace.used(), 0);
  EXPECT_GT(workspace.peak(), 64 * 4 * (16 + 16) * 4);  // The expanded chunk alone.
}

TEST(MlaLayer, ReloadChangesEveryWeight) {
  WorldOptions options;
  options.shape = {.q_lora = 24, .biases = true, .sinks = true};
  for (MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
    options.absorption = absorption;
    World world(options, kMixedLengths, 1);
    const test::LayerWeights other(options.shape, DType::f32, 77);
    const_cast<MlaLayer&>(world.layer()).reload(other.views());
    world.weights().take_values_of(other);
    serve_mixed(world);
  }
}

TEST(MlaLayer, FullAbsorptionHoldsMoreWeights) {
  const LayerShape shape = kShapes[2].shape;
  const test::LayerWeights weights(shape, DType::bf16, 1);
  const auto bytes = [&](MlaAbsorption absorption) {
    return MlaLayer(shape.dims(), weights.views(), nullptr,
                    {.absorption = absorption, .linear = LinearBackend::plain})
        .weight_bytes();
  };
  const std::int64_t N = 16, L = 512, P = 128, R = 64, V = 128, H = 128;
  const std::int64_t common = (L + R) * H + N * (P + R) * H + N * (P + V) * L + H * N * V + L;
  EXPECT_EQ(bytes(MlaAbsorption::two_step), 2 * (common + N * (P + V) * L));
  EXPECT_EQ(bytes(MlaAbsorption::full), 2 * (common + N * L * H + N * R * H + N * L * H));
}

}  // namespace
}  // namespace fovea
