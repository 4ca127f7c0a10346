// What a step takes and refuses.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fovea/error.h"
#include "layers/allocations.h"
#include "layers/mla_world.h"

namespace fovea {
namespace {

using test::World;
using test::WorldOptions;

TEST(MlaRun, AllocatesNothingGivenAPlan) {
  for (MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      WorldOptions options;
      options.dtype = dtype;
      options.absorption = absorption;
      options.linear = LinearBackend::plain;
      options.shape.q_lora = 24;
      World world(options, {200, 120, 9});
      if (!test::computes_on_host(world.context())) {
        GTEST_SKIP() << "cuBLASLt allocates as it likes";
      }
      world.run({{0, 150}, {1, 80}});
      World::Step s = world.prepare({{1, 1}, {0, 20}, {2, 9}});  // Several context chunks.
      s.step.plan = &s.plan;
      ASSERT_GT(s.plan.chunks.size(), 1u);
      OpContext ctx = world.context();
      Workspace workspace;
      workspace.reserve(world.layer().workspace_bytes(ctx, s.plan));
      ctx.workspace = &workspace;
      const auto step = [&] { world.layer()(ctx, *s.hidden, *s.out, s.step, world.cache()); };
      step();
      EXPECT_LE(test::count_allocations(step), 0);
    }
  }
}

TEST(MlaRun, LimitsCoverRandomPlans) {
  WorldOptions options;
  options.shape.q_lora = 24;
  options.split = {.reorder_batch_threshold = 3, .support = QueryLenSupport::varlen};
  for (MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
    for (const char* backend : {"cpu", "reference"}) {
      for (DType dtype : {DType::f32, DType::bf16}) {
        options.absorption = absorption;
        options.backend = backend;
        options.dtype = dtype;
        const World world(options, {1});
        AttentionLimits limits{.max_tokens = 96,
                               .max_num_seqs = 12,
                               .workspace_rows = 64,
                               .max_seq_len = 3000,
                               .max_decode_query_len = 3};
        const std::int64_t bound = world.layer().workspace_bytes(world.context(), limits);
        std::int64_t most = 0;
        for (std::uint64_t seed = 0; seed < 300; ++seed) {
          SequenceBatch batch;
          batch.query_start_loc = {0};
          std::vector<std::int32_t> lens;
          std::int64_t tokens = test::random_below(seed, 0, 96) + 1;
          for (std::uint64_t i = 1; i <= 12 && tokens > 0; ++i) {
            const std::int64_t cap = test::random_below(seed, 50 + i, 2) == 0 ? 3 : tokens;
            const std::int64_t len =
                1 + test::random_below(seed, i, std::min<std::int64_t>(cap, tokens));
            lens.push_back(static_cast<std::int32_t>(len));
            tokens -= len;
          }
          std::sort(lens.begin(), lens.end());
          for (std::size_t i = 0; i < lens.size(); ++i) {
            batch.query_start_loc.push_back(batch.query_start_loc.back() + lens[i]);
            batch.seq_lens.push_back(lens[i] + static_cast<std::int32_t>(test::random_below(
                                                   seed, 100 + i, 3001 - lens[i])));
          }
          PlanOptions plan_options;
          plan_options.split = options.split;
          plan_options.workspace_rows = 64;
          const BatchPlan plan = make_plan(batch, world.context().plan_target, plan_options);
          const std::int64_t bytes = world.layer().workspace_bytes(world.context(), plan);
          most = std::max(most, bytes);
          ASSERT_LE(bytes, bound) << plan.to_text();
        }
        EXPECT_GT(most, bound / 3) << "the bound is needlessly high";
      }
    }
  }
}

TEST(MlaRun, LimitsCoverDecodesCutForManyWorkers) {
  for (int threads : {1, 2, 5, 8}) {
    WorldOptions options;
    options.threads = threads;
    options.shape = {.heads = 32, .latent = 64, .nope = 4, .rope = 2, .value = 4};
    const World world(options, {1});
    const AttentionLimits limits{
        .max_tokens = 9, .max_num_seqs = 9, .workspace_rows = 0, .max_seq_len = 5000};
    const std::int64_t bound = world.layer().workspace_bytes(world.context(), limits);
    std::int32_t most_partials = 0;
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
      SequenceBatch batch;
      batch.query_start_loc = {0};
      const std::int64_t requests = 1 + test::random_below(seed, 0, 9);
      for (std::int64_t i = 1; i <= requests; ++i) {
        batch.query_start_loc.push_back(static_cast<std::int32_t>(i));
        batch.seq_lens.push_back(static_cast<std::int32_t>(
            1 + test::random_below(seed, static_cast<std::uint64_t>(i), 5000)));
      }
      const BatchPlan plan = make_plan(batch, world.context().plan_target, {});
      most_partials = std::max(most_partials, plan.decode.num_partials());
      ASSERT_LE(world.layer().workspace_bytes(world.context(), plan), bound) << plan.to_text();
    }
    if (threads > 2) {
      EXPECT_GT(most_partials, threads);
    }
  }
}

/// Refused, with a text that holds `part`, before the cache or the output was written.
class MlaRefusal : public testing::Test {
 protected:
  MlaRefusal() : world_({}, {40, 40}) {
    world_.run({{0, 30}});
    step_ = world_.prepare({{0, 1}, {1, 4}});
    step_.step.plan = &step_.plan;
    workspace_.reserve(64 << 20);
    slot_ = static_cast<std::int64_t>(test::to_doubles(step_.slots)[0]);
  }

  void expect_refused(const std::string& part, ErrorCode code = ErrorCode::invalid_argument) {
    OpContext ctx = world_.context();
    ctx.workspace = &workspace_;
    try {
      world_.layer()(ctx, *step_.hidden, *step_.out, step_.step, world_.cache());
      FAIL() << "not refused: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_EQ(workspace_.used(), 0);
    EXPECT_TRUE(
        test::still_poisoned(world_.cache().slot(slot_), world_.cache().format().row_bytes()));
    for (double value : test::to_doubles(*step_.out)) EXPECT_TRUE(std::isnan(value));
  }

  World world_;
  World::Step step_;
  Workspace workspace_;
  std::int64_t slot_ = 0;
};

TEST_F(MlaRefusal, BlockIdOutOfRange) {
  step_.table[0] = 99;
  expect_refused("99");
}

TEST_F(MlaRefusal, BlockTableTooNarrow) {
  step_.step.block_table.width = 1;
  expect_refused("block_table");
}

TEST_F(MlaRefusal, BlockTableWithTooFewRows) {
  step_.step.block_table.requests = 1;
  expect_refused("block_table has 1 rows, but must have one for each of the plan's 2 requests");
}

TEST_F(MlaRefusal, SlotOutOfRange) {
  test::assign(step_.slots.view().slice(0, 3, 4), std::vector<double>{123456});
  expect_refused("slot_mapping[3] is 123456");
}

TEST_F(MlaRefusal, SlotMappingOfAnotherLength) {
  step_.step.slot_mapping = step_.slots.view().slice(0, 0, 5);
  expect_refused("slot_mapping is i64[5]");
}

TEST_F(MlaRefusal, PositionsMissing) {
  step_.step.positions = {};
  expect_refused("positions is absent");
}

TEST_F(MlaRefusal, PositionBeyondTheTable) {
  test::assign(step_.positions.view().slice(0, 2, 3), std::vector<double>{4096});
  expect_refused("positions[2] is 4096");
}

TEST_F(MlaRefusal, WorkspaceTooSmall) {
  OpContext ctx = world_.context();
  const std::int64_t needed = world_.layer().workspace_bytes(ctx, step_.plan);
  Workspace small;
  small.reserve(needed - 64);
  ctx.workspace = &small;
  try {
    world_.layer()(ctx, *step_.hidden, *step_.out, step_.step, world_.cache());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
    EXPECT_NE(std::string(error.what()).find(std::to_string(needed)), std::string::npos);
  }
  EXPECT_TRUE(
      test::still_poisoned(world_.cache().slot(slot_), world_.cache().format().row_bytes()));
}

TEST_F(MlaRefusal, PlanWithMoreRowsThanTheHiddenStates) {
  const BatchPlan larger = world_.plan_of({{0, 1}, {1, 30}});
  step_.step.plan = &larger;
  expect_refused("hidden is f32[7, 48]");
}

TEST_F(MlaRefusal, CacheOfAnotherWidth) {
  const PagedKvCache other = PagedKvCache::allocate({.dtype = DType::f32, .row_elements = 41},
                                                    {.num_blocks = 20, .block_size = 16});
  OpContext ctx = world_.context();
  ctx.workspace = &workspace_;
  EXPECT_THROW(world_.layer()(ctx, *step_.hidden, *step_.out, step_.step, other), Error);
  for (double value : test::to_doubles(*step_.out)) EXPECT_TRUE(std::isnan(value));
}

TEST_F(MlaRefusal, PlanOfSeveralContextRanks) {
  World::Step later = world_.prepare({{0, 5}});
  SequenceBatch batch;
  batch.query_start_loc = {0, 5};
  batch.seq_lens = {35};
  PlanOptions options;
  options.parallel = ContextParallel{.ranks = 2, .rank = 0, .interleave = 1};
  const BatchPlan plan = make_plan(batch, world_.context().plan_target, options);
  later.step.plan = &plan;
  step_ = std::move(later);
  expect_refused("context ranks", ErrorCode::unsupported);
}

TEST_F(MlaRefusal, PlanOverBlocksAndAdapters) {
  step_.step.lora_ids = step_.positions;
  expect_refused("MLA has no LoRA", ErrorCode::unsupported);
  step_.step.lora_ids = {};
  SequenceBatch batch;
  batch.query_start_loc = {0, 1, 5};
  batch.seq_lens = {31, 4};
  PlanOptions options;
  options.context_plan = ContextPlanKind::paged;
  step_.plan = make_plan(batch, world_.context().plan_target, options);
  expect_refused("ContextPlanKind::paged");
}

TEST(MlaLayerWeights, ErrorsNameTheWeight) {
  const test::LayerShape shape{.q_lora = 24, .biases = true};
  const test::LayerWeights weights(shape, DType::f32, 1);
  const auto error_of = [&](const auto& change) -> std::string {
    MlaWeights changed = weights.views();
    change(changed);
    try {
      MlaLayer(shape.dims(), changed, nullptr);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(error_of([](MlaWeights& w) { w.q_a_proj = {}; }), "q_a_proj is absent");
  expect(error_of([](MlaWeights& w) { w.kv_a_layernorm = w.q_a_layernorm; }),
         "kv_a_layernorm is f32[24]");
  expect(error_of([](MlaWeights& w) { w.kv_b_proj = w.o_proj; }), "kv_b_proj is f32[48, 64]");
  expect(error_of([](MlaWeights& w) { w.o_proj = w.kv_b_proj; }), "must be f32[48, 64]");
  expect(error_of([](MlaWeights& w) { w.o_bias = w.q_a_bias; }), "o_bias is f32[24]");
  const Tensor wrong_dtype = Tensor::zeros(DType::bf16, {96, 24});
  expect(error_of([&](MlaWeights& w) { w.q_b_proj = wrong_dtype; }), "q_b_proj is bf16[96, 24]");
  test::LayerShape without = shape;
  without.q_lora = 0;
  EXPECT_THROW(MlaLayer(without.dims(), weights.views(), nullptr), Error);
}

TEST(MlaAttentionCall, RotatedOutsideEqualsRotatedInTheLayer) {
  // The layer's pieces by hand: attention over operands that the caller projected and rotated.
  World world({}, {30});
  World::Step s = world.prepare({{0, 12}});
  s.step.plan = &s.plan;
  const OpContext& ctx = world.context();
  const oracle::MlaWeights& w = world.weights().oracle();
  std::vector<std::int64_t> positions(12);
  std::iota(positions.begin(), positions.end(), 0);
  const std::span<const double> hidden = world.hidden_of(0, 0, 12);
  const std::int64_t N = 4, L = 32, P = 16, R = 8, V = 16, rows = 14;
  test::PaddedTensor q(DType::f32, {rows, N, P + R}), kv(DType::f32, {rows, L + R});
  test::PaddedTensor out(DType::f32, {rows, N, V}, 3);
  test::assign(q.view().slice(0, 0, 12), oracle::mla_queries(w, hidden, positions));
  test::assign(kv.view().slice(0, 0, 12), oracle::mla_latent_rows(w, hidden, positions));
  const MlaAttention attention(world.layer().dims(), world.weights().views().kv_b_proj,
                               {.linear = test::linear_for(ctx, LinearBackend::plain),
                                .memory = ctx.memory});
  ctx.workspace->reserve(attention.workspace_bytes(ctx, s.plan));
  attention(
      ctx,
      {.q = q, .kv_c = kv.view().slice(1, 0, L), .k_pe = kv.view().slice(1, L, L + R), .out = out},
      s.step, world.cache());
  const std::vector<double> expected = oracle::mla_attention(
      w, oracle::mla_queries(w, hidden, positions), oracle::mla_latent_rows(w, hidden, positions),
      true, oracle::MlaForm::absorbed);
  EXPECT_TRUE(test::rows_close(expected, out.view().slice(0, 0, 12), {1e-5, 0}));
  EXPECT_EQ(test::to_doubles(out.view().slice(0, 12, 14)), std::vector<double>(2 * N * V, 0.0));
  EXPECT_TRUE(out.padding_untouched());
}

}  // namespace
}  // namespace fovea
