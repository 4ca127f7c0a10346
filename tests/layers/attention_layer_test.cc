#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fovea/error.h"
#include "layers/allocations.h"
#include "layers/gqa_world.h"
#include "layers/rows_difference.h"

namespace fovea {
namespace {

using test::Extend;
using test::GqaOptions;
using test::GqaShape;
using test::GqaWorld;

/// Prefills, chunks and decodes mixed: [decode.., prefill..] in every step.
void serve_mixed(GqaWorld& world) {
  world.run({{0, 21}});                          // One prefill, no context.
  world.run({{0, 1}, {1, 9}});                   // Decode and a first prefill.
  world.run({{0, 1}, {1, 1}});                   // Decodes only.
  world.run({{1, 1}, {0, 7}, {2, 5}, {3, 30}});  // Context in one, none in two.
  world.run({{1, 1}, {2, 1}, {0, 3}, {3, 12}});  // Contexts of different lengths.
}
const std::vector<std::int32_t> kMixedLengths = {33, 13, 6, 42};

struct NamedOptions {
  const char* name;
  GqaOptions options;
  friend void PrintTo(const NamedOptions& named, std::ostream* out) { *out << named.name; }
};

std::vector<NamedOptions> cases() {
  const GqaDims llama{
      .hidden_size = 64, .num_heads = 8, .num_kv_heads = 2, .head_dim = 64, .v_head_dim = 64};
  std::vector<NamedOptions> list;
  const auto add = [&](const char* name, const GqaOptions& options) {
    list.push_back({name, options});
  };
  add("tiny", {});
  add("fused_weights_and_biases", {.shape = {.fused_weights = true, .biases = true}});
  add("separate_weights_and_biases", {.shape = {.biases = true}});
  add("one_cache_of_columns", {.shape = {.dims = llama}, .one_cache = true});
  add("wide_heads_of_hidden_size_over_heads",
      {.shape = {.dims = {.hidden_size = 32, .num_heads = 4, .num_kv_heads = 1, .head_dim = 24}},
       .rope_dim = 24});
  add("multi_head", {.shape = {.dims = {.hidden_size = 48, .num_heads = 3}}});
  add("narrow_values", {.shape = {.dims = {.hidden_size = 40,
                                           .num_heads = 6,
                                           .num_kv_heads = 2,
                                           .head_dim = 24,
                                           .v_head_dim = 10}},
                        .one_cache = true});
  add("seven_heads_to_one",
      {.shape = {.dims = {.hidden_size = 40, .num_heads = 7, .num_kv_heads = 1, .head_dim = 16}}});
  add("scaled_queries",
      {.shape = {.dims = {.hidden_size = 40, .num_heads = 4, .head_dim = 16, .q_scaling = 2}}});
  add("norm_before_rotation", {.shape = {.qk_norm = QkNorm::pre_rope}});
  add("norm_after_rotation", {.shape = {.qk_norm = QkNorm::post_rope}});
  add("norm_of_whole_width",
      {.shape = {.qk_norm = QkNorm::pre_rope, .norm_whole_width = true}, .one_cache = true});
  add("norm_of_whole_width_after_rotation",
      {.shape = {.qk_norm = QkNorm::post_rope, .norm_whole_width = true}});
  add("part_of_a_head_turns", {.rope_dim = 8, .pairing = RopePairing::interleaved});
  add("nothing_turns", {.rope_dim = 0});
  add("turned_before_storing",
      {.shape = {.qk_norm = QkNorm::pre_rope}, .rope_fusion = RopeFusion::separate});
  add("turned_on_the_way_by_request", {.rope_fusion = RopeFusion::fused});
  add("norm_after_rotation_before_storing",
      {.shape = {.qk_norm = QkNorm::post_rope}, .rope_fusion = RopeFusion::separate});
  add("three_axes_of_qwen2_vl",
      {.shape = {.dims = {.hidden_size = 40, .num_heads = 2, .num_kv_heads = 1, .head_dim = 128}},
       .rope_dim = 128,
       .sections = {.pairs = {24, 20, 20}}});
  add("three_axes", {.sections = {.pairs = {4, 2, 2}}});
  add("three_axes_interleaved_separate",
      {.sections = {.pairs = {4, 2, 2}, .interleaved = true}, .rope_fusion = RopeFusion::separate});
  add("positions_of_two_dimensions", {.two_dim_positions = true});
  add("sinks_and_window",
      {.shape = {.biases = true, .sinks = true}, .variant = {.window_left = 9}, .one_cache = true});
  add("window_of_one_block", {.variant = {.window_left = 7}});
  add("attention_chunks", {.shape = {.sinks = true}, .variant = {.attention_chunk = 6}});
  add("soft_cap", {.shape = {.sinks = true}, .variant = {.window_left = 12, .soft_cap = 1.5f}});
  add("four_adapters", {.shape = {.qk_norm = QkNorm::pre_rope, .adapters = 4}});
  add("two_adapters_beside_a_bias",
      {.shape = {.fused_weights = true, .biases = true, .adapters = 2}});
  return list;
}

class AttentionLayerTest : public testing::TestWithParam<NamedOptions> {};

TEST_P(AttentionLayerTest, MixedBatches) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    SCOPED_TRACE(name_of(dtype));
    GqaOptions options = GetParam().options;
    options.dtype = dtype;
    GqaWorld world(options, kMixedLengths);
    serve_mixed(world);
  }
}

INSTANTIATE_TEST_SUITE_P(Options, AttentionLayerTest, testing::ValuesIn(cases()),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST(AttentionLayer, EveryLinearBackendAndEveryOpBackend) {
  for (const char* backend : {"cpu", "reference"}) {
    for (LinearBackend linear : {LinearBackend::plain, LinearBackend::onednn}) {
      GqaOptions options{.shape = {.sinks = true, .adapters = 2},
                         .dtype = DType::bf16,
                         .variant = {.window_left = 9},
                         .linear = linear,
                         .backend = backend};
      try {
        GqaWorld world(options, kMixedLengths);
        serve_mixed(world);
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::unsupported) << error.what();
      }
    }
  }
}

TEST(AttentionLayer, KeysThatTurnOnTheWayHaveTheBitsOfThoseThatTurnBefore) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (const MropeSections& sections : {MropeSections{}, MropeSections{.pairs = {4, 2, 2}}}) {
      GqaOptions options{.shape = {.qk_norm = QkNorm::pre_rope}, .dtype = dtype};
      options.sections = sections;
      GqaWorld fused(options, kMixedLengths);
      options.rope_fusion = RopeFusion::separate;
      GqaWorld separate(options, kMixedLengths);
      serve_mixed(fused);
      serve_mixed(separate);
      for (std::size_t i = 0; i < kMixedLengths.size(); ++i) {
        EXPECT_EQ(fused.outputs(i), separate.outputs(i));
      }
    }
  }
}

TEST(AttentionLayer, FusedAndSeparateWeightsComeOutAlike) {
  // One generator fills both: the same values in either form.
  GqaOptions options{.shape = {.fused_weights = true}};
  GqaWorld fused(options, kMixedLengths);
  options.shape.fused_weights = false;
  GqaWorld separate(options, kMixedLengths);
  serve_mixed(fused);
  serve_mixed(separate);
  EXPECT_EQ(fused.outputs(3), separate.outputs(3));
}

TEST(AttentionLayer, ChunkedPrefillEqualsOnePrefill) {
  for (const AttentionVariant& variant : {AttentionVariant{}, AttentionVariant{.window_left = 8},
                                          AttentionVariant{.attention_chunk = 16}}) {
    GqaOptions options{.shape = {.sinks = true}, .variant = variant};
    GqaWorld whole(options, {48});
    whole.run({{0, 48}});
    for (std::int32_t size : {1, 2, 3, 16, 17}) {
      GqaWorld chunked(options, {48});
      for (std::int32_t done = 0; done < 48; done += size) {
        chunked.run({{0, std::min(size, 48 - done)}});
      }
      EXPECT_LT(test::worst_row_difference(whole.outputs(0), chunked.outputs(0), 40), 1e-5)
          << "chunks of " << size;
    }
  }
}

TEST(AttentionLayer, LengthsAroundTheWindow) {
  GqaOptions options{.shape = {.sinks = true}, .variant = {.window_left = 15}};
  GqaWorld world(options, {18, 18, 18});
  world.run({{0, 15}, {1, 16}, {2, 17}});
  world.run({{0, 1}, {1, 1}, {2, 1}});
  world.run({{0, 1}, {1, 1}});
  // Far beyond it: what lies before is in no schedule.
  GqaWorld far(options, {300, 200});
  far.run({{0, 290}, {1, 190}});
  far.run({{0, 1}, {1, 7}});
  far.run({{0, 1}, {1, 1}});
}

TEST(AttentionLayer, SeveralQueryTokensPerDecode) {
  for (std::int64_t window_left : {-1, 5}) {
    GqaOptions options{.shape = {.sinks = true, .adapters = 2},
                       .variant = {.window_left = window_left},
                       .split = {.reorder_batch_threshold = 4, .support = QueryLenSupport::varlen}};
    GqaWorld world(options, {40, 30, 50});
    world.run({{0, 30}, {1, 20}, {2, 5}});
    world.run({{0, 3}, {1, 2}, {2, 20}});
    world.run({{1, 4}, {0, 2}, {2, 1}});
  }
}

TEST(AttentionLayer, BlocksOfTokensThatSeeEachOther) {
  for (std::int64_t window_left : {-1, 5}) {
    GqaWorld world(
        {.shape = {.sinks = true}, .variant = {.causal = false, .window_left = window_left}},
        {20, 20});
    world.run({{0, 9}, {1, 9}});
    world.run({{0, 4}, {1, 4}});
  }
}

TEST(AttentionLayer, DraftTreesStandAtTheirDepth) {
  // 0 - 1 - 2 and 0 - 3 - 4; a chain; both beside a prefill.
  const std::vector<std::uint64_t> tree = {0b1, 0b11, 0b111, 0b1001, 0b11001}, chain = {1, 3};
  for (std::int64_t window_left : {-1, 2}) {
    GqaOptions options{.shape = {.sinks = true},
                       .variant = {.window_left = window_left},
                       .split = {.reorder_batch_threshold = 5, .support = QueryLenSupport::varlen}};
    GqaWorld world(options, {40, 30, 50});
    world.run({{0, 30}, {1, 20}, {2, 9}});
    world.run({{0, 5, tree}, {1, 2, chain}, {2, 11}});
  }
}

TEST(AttentionLayer, ASinkTakesPartOfTheFirstTokensWeight) {
  // One key of weight e^s / (e^s + e^sink): a sink that counts twice or not at all shows here.
  GqaOptions options{.shape = {.sinks = true}};
  GqaWorld with(options, {1});
  with.run({{0, 1}});
  options.shape.sinks = false;
  GqaWorld without(options, {1});
  without.run({{0, 1}});
  EXPECT_GT(test::worst_row_difference(without.outputs(0), with.outputs(0), 40), 0.1);
}

TEST(AttentionLayer, RowsWithoutAnAdapterKeepTheirBits) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    GqaOptions options{.shape = {.adapters = 3}, .dtype = dtype};
    GqaWorld world(options, {20});
    GqaWorld::Step s = world.prepare({{0, 12}});
    s.step.plan = &s.plan;
    OpContext ctx = world.context();
    Workspace workspace;
    workspace.reserve(world.layer().workspace_bytes(ctx, s.plan));
    ctx.workspace = &workspace;
    const auto run = [&] {
      world.layer()(ctx, *s.hidden, *s.out, s.step, world.cache());
      return test::to_doubles(s.out->view().slice(0, 0, 12));
    };
    const std::vector<double> adapted = run();
    s.step.lora_ids = {};
    const std::vector<double> plain = run();
    EXPECT_NE(adapted, plain);
    test::assign(s.lora_ids, std::vector<double>(14, -1));
    s.step.lora_ids = s.lora_ids;
    EXPECT_EQ(run(), plain);
  }
}

TEST(AttentionLayer, AStepWithoutTokensWritesZeros) {
  GqaWorld world({.shape = {.qk_norm = QkNorm::pre_rope, .adapters = 2}}, {20});
  for (const std::vector<Extend>& extends : {std::vector<Extend>{}, {{0, 0}}}) {
    GqaWorld::Step s = world.prepare(extends);
    s.step.plan = &s.plan;
    world.layer()(world.context(), *s.hidden, *s.out, s.step, world.cache());
    EXPECT_EQ(test::to_doubles(*s.out), std::vector<double>(2 * 40, 0.0));
  }
}

TEST(AttentionLayer, SkippedSlotsAreNotStored) {
  GqaWorld world({}, {20});
  GqaWorld::Step s = world.prepare({{0, 5}});
  s.step.plan = &s.plan;
  test::assign(s.slots.view().slice(0, 4, 5), std::vector<double>{-1});
  OpContext ctx = world.context();
  Workspace workspace;
  workspace.reserve(world.layer().workspace_bytes(ctx, s.plan));
  ctx.workspace = &workspace;
  world.layer()(ctx, *s.hidden, *s.out, s.step, world.cache());
  for (const PagedKvCache* cache : {&world.cache().k, &world.cache().v}) {
    EXPECT_TRUE(
        test::still_poisoned(cache->slot(world.slot_of(0, 4)), cache->format().row_bytes()));
    EXPECT_FALSE(
        test::still_poisoned(cache->slot(world.slot_of(0, 3)), cache->format().row_bytes()));
  }
}

TEST(AttentionLayer, ProfileRunTakesTheWorstStepAndGivesZeros) {
  GqaWorld world({}, {20});
  test::PaddedTensor hidden(DType::f32, {7, 40}), out(DType::f32, {7, 40});
  OpContext ctx = world.context();
  Workspace workspace;
  ctx.workspace = &workspace;
  AttentionStep step;
  step.profile_limits = {.max_tokens = 100, .max_num_seqs = 10, .max_seq_len = 500};
  world.layer()(ctx, hidden, out, step, GqaCache());
  EXPECT_EQ(test::to_doubles(out), std::vector<double>(7 * 40, 0.0));
  EXPECT_TRUE(out.padding_untouched());
  EXPECT_EQ(workspace.peak(), world.layer().workspace_bytes(ctx, step.profile_limits));
  EXPECT_GT(workspace.peak(), 100 * (6 + 2 + 2 + 6) * 16 * 4);  // Projections and output alone.
}

TEST(AttentionLayer, LimitsCoverRandomPlans) {
  for (const char* backend : {"cpu", "reference"}) {
    GqaOptions options{.shape = {.sinks = true, .adapters = 2},
                       .dtype = DType::bf16,
                       .backend = backend,
                       .split = {.reorder_batch_threshold = 3, .support = QueryLenSupport::varlen}};
    GqaWorld world(options, {1});
    const AttentionLimits limits{
        .max_tokens = 96, .max_num_seqs = 12, .max_seq_len = 3000, .max_decode_query_len = 3};
    const std::int64_t bound = world.layer().workspace_bytes(world.context(), limits);
    std::int64_t most = 0;
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
      std::vector<std::int32_t> lens;
      std::int64_t tokens = test::random_below(seed, 0, 96) + 1;
      for (std::uint64_t i = 1; i <= 12 && tokens > 0; ++i) {
        const std::int64_t cap = test::random_below(seed, 50 + i, 2) == 0 ? 3 : tokens;
        const std::int64_t len = 1 + test::random_below(seed, i, std::min(cap, tokens));
        lens.push_back(static_cast<std::int32_t>(len));
        tokens -= len;
      }
      std::sort(lens.begin(), lens.end());
      SequenceBatch batch{
          .query_start_loc = {0}, .seq_lens = {}, .is_prefilling = {}, .draft_tree = {}};
      for (std::size_t i = 0; i < lens.size(); ++i) {
        batch.query_start_loc.push_back(batch.query_start_loc.back() + lens[i]);
        batch.seq_lens.push_back(
            lens[i] + static_cast<std::int32_t>(test::random_below(seed, 100 + i, 3001 - lens[i])));
      }
      PlanOptions plan_options;
      plan_options.split = options.split;
      plan_options.context_plan = ContextPlanKind::paged;
      const BatchPlan plan = make_plan(batch, world.context().plan_target, plan_options);
      const std::int64_t bytes = world.layer().workspace_bytes(world.context(), plan);
      most = std::max(most, bytes);
      ASSERT_LE(bytes, bound) << plan.to_text();
    }
    EXPECT_GT(most, bound / 3) << "the bound is needlessly high";
  }
}

TEST(AttentionLayer, AllocatesNothingGivenAPlan) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    GqaOptions options{.shape = {.qk_norm = QkNorm::pre_rope, .sinks = true, .adapters = 3},
                       .dtype = dtype,
                       .linear = LinearBackend::plain};
    GqaWorld world(options, {200, 120, 9});
    if (!test::computes_on_host(world.context())) GTEST_SKIP() << "cuBLASLt allocates as it likes";
    world.run({{0, 150}, {1, 80}});
    GqaWorld::Step s = world.prepare({{1, 1}, {0, 20}, {2, 9}});
    s.step.plan = &s.plan;
    OpContext ctx = world.context();
    Workspace workspace;
    workspace.reserve(world.layer().workspace_bytes(ctx, s.plan));
    ctx.workspace = &workspace;
    const auto step = [&] { world.layer()(ctx, *s.hidden, *s.out, s.step, world.cache()); };
    step();
    EXPECT_LE(test::count_allocations(step), 0);
  }
}

TEST(AttentionLayer, ReloadChangesEveryWeight) {
  for (bool fused : {false, true}) {
    const GqaOptions options{.shape = {.fused_weights = fused,
                                       .biases = true,
                                       .qk_norm = QkNorm::pre_rope,
                                       .sinks = true,
                                       .adapters = 2}};
    GqaWorld world(options, kMixedLengths, 1);
    const GqaWorld other(options, {1}, 77);
    const test::GqaLayerWeights weights(options.shape, DType::f32, 77);
    world.layer().reload(weights.views());
    for (int id = -1; id < 2; ++id) {
      const oracle::Rotary rotary = world.weights().twin(id).rotary;
      world.weights().twins()[static_cast<std::size_t>(id + 1)] = weights.twin(id);
      world.weights().twins()[static_cast<std::size_t>(id + 1)].rotary = rotary;
    }
    serve_mixed(world);
  }
}

TEST(AttentionLayer, WeightBytesAreThoseOfTheFusedForm) {
  const GqaShape shape{.dims = {.hidden_size = 64,
                                .num_heads = 4,
                                .num_kv_heads = 2,
                                .head_dim = 32,
                                .v_head_dim = 16},
                       .qk_norm = QkNorm::pre_rope,
                       .sinks = true};
  const test::GqaLayerWeights weights(shape, DType::bf16, 1);
  const AttentionLayer layer(shape.dims, weights.views(), nullptr,
                             {.qk_norm = QkNorm::pre_rope, .linear = LinearBackend::plain});
  EXPECT_EQ(layer.weight_bytes(),
            2 * (64 * (4 * 32 + 2 * 32 + 2 * 16) + 64 * 4 * 16 + 32 + 32) + 4 * 4);
}

}  // namespace
}  // namespace fovea
