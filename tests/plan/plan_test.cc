#include "fovea/plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "plan/plan_testing.h"

namespace fovea::testing {
namespace {

SequenceBatch batch_of(const Lens& query_lens, const Lens& context_lens) {
  SequenceBatch batch;
  batch.query_start_loc = offsets_of(query_lens);
  for (std::size_t i = 0; i < query_lens.size(); ++i) {
    batch.seq_lens.push_back(query_lens[i] + context_lens[i]);
  }
  return batch;
}

PlanOptions options_of(std::int64_t workspace_rows,
                       ContextPlanKind kind = ContextPlanKind::packed) {
  PlanOptions options;
  options.workspace_rows = workspace_rows;
  options.context_plan = kind;
  return options;
}

TEST(Plan, MixedBatchIsCountedFromTheFirstPrefill) {  // B083, F055, F056, F062, F112
  const BatchPlan plan = make_plan(batch_of({1, 1, 7, 3}, {9, 30, 0, 5}), {}, options_of(64));
  EXPECT_EQ(plan.split, (BatchSplit{2, 2, 2, 10}));
  EXPECT_EQ(plan.num_actual_tokens, 12);
  EXPECT_EQ(plan.max_query_len, 7);
  EXPECT_EQ(plan.max_seq_len, 31);
  EXPECT_EQ(plan.decode.query_start_loc, (Lens{0, 1, 2}));
  EXPECT_EQ(plan.decode.seq_lens, (Lens{10, 31}));
  EXPECT_EQ(plan.prefill.cu_seqlens_q, (Lens{0, 7, 10}));
  EXPECT_EQ(plan.prefill.cu_seqlens_k, (Lens{0, 7, 10}));
  EXPECT_EQ(plan.context_lens, (Lens{0, 5}));
  ASSERT_EQ(plan.chunks.size(), 1u);
  EXPECT_EQ(plan.chunks[0].requests, (IndexRange{1, 2}));
  EXPECT_EQ(plan.chunks[0].tokens, (IndexRange{7, 10}));
  EXPECT_EQ(plan.empty_token_slices, (std::vector<IndexRange>{{0, 7}}));
  EXPECT_EQ(plan.peak_context_rows, 5);
  EXPECT_FALSE(plan.single_context_partial());
}

TEST(Plan, PrefillWithoutContextIsLeftToTheNeutralPartial) {  // B005, F102
  const SequenceBatch batch = batch_of({5, 5}, {0, 300});
  const BatchPlan equal = make_plan(batch, {}, options_of(256, ContextPlanKind::equal));
  ASSERT_EQ(equal.chunks.size(), 2u);
  EXPECT_EQ(equal.chunks[0].seq_lens, (Lens{0, 256}));
  EXPECT_EQ(equal.chunks[1].seq_lens, (Lens{0, 44}));
  EXPECT_EQ(equal.chunks[0].tokens, (IndexRange{0, 10}));
  EXPECT_EQ(equal.chunks[0].merge_end, 0);
  EXPECT_EQ(equal.chunks[1].merge_end, 10);
  const BatchPlan packed = make_plan(batch, {}, options_of(256));
  ASSERT_EQ(packed.chunks.size(), 2u);
  EXPECT_EQ(packed.chunks[0].tokens, (IndexRange{5, 10}));
  EXPECT_EQ(packed.chunks[1].merge_end, 10);
  for (const BatchPlan& plan : {equal, packed}) {
    EXPECT_EQ(plan.empty_token_slices, (std::vector<IndexRange>{{0, 5}}));
  }
}

TEST(Plan, OneChunkOverAllPrefillsNeedsNoRunningPartial) {  // F119
  const auto is_single = [](const Lens& context_lens, std::int64_t rows) {
    const Lens query_lens(context_lens.size(), 2);
    return make_plan(batch_of(query_lens, context_lens), {}, options_of(rows))
        .single_context_partial();
  };
  EXPECT_TRUE(is_single({10, 20}, 32));
  EXPECT_FALSE(is_single({10, 20}, 16));
  EXPECT_FALSE(is_single({10, 0}, 32));
  EXPECT_FALSE(is_single({0, 0}, 32));
}

TEST(Plan, WorkspaceIsNotNeededWithoutContext) {  // F078, B082
  const BatchPlan plan = make_plan(batch_of({1, 9, 4}, {100, 0, 0}), {}, options_of(0));
  EXPECT_FALSE(plan.has_context());
  EXPECT_TRUE(plan.empty_token_slices.empty());
  EXPECT_EQ(plan.peak_context_rows, 0);
  expect_error(ErrorCode::invalid_argument, {"workspace_rows is 0"},
               [] { make_plan(batch_of({9}, {1}), {}, options_of(0)); });
}

TEST(Plan, RequestsWithoutQueryTokensCostNothing) {  // B078, F192
  SequenceBatch batch = batch_of({1, 8, 0, 0}, {40, 50, 70, 0});
  const BatchPlan mixed = make_plan(batch, {}, options_of(64));
  EXPECT_EQ(mixed.split, (BatchSplit{1, 3, 1, 8}));
  EXPECT_EQ(mixed.context_lens, (Lens{50, 0, 0}));
  ASSERT_EQ(mixed.chunks.size(), 1u);
  EXPECT_EQ(mixed.chunks[0].requests, (IndexRange{0, 1}));
  EXPECT_TRUE(mixed.single_context_partial());
  EXPECT_EQ(mixed.max_seq_len, 58);
  batch = batch_of({1, 0, 0}, {6, 99, 0});
  const BatchPlan decode = make_plan(batch, {}, options_of(64));
  EXPECT_EQ(decode.split, (BatchSplit{3, 0, 1, 0}));
  EXPECT_EQ(decode.decode.items, (std::vector<WorkItem>{{0, 0, 7, -1}}));
}

TEST(Plan, NonCausalBlocksAreDecodesAndUncausal) {  // F223-F226
  PlanOptions options = options_of(64);
  options.variant.causal = false;
  const SequenceBatch batch = batch_of({4, 4, 0}, {10, 20, 0});
  const BatchPlan plan = make_plan(batch, {}, options);
  EXPECT_EQ(plan.split, (BatchSplit{3, 0, 8, 0}));
  EXPECT_FALSE(plan.variant.causal);
  EXPECT_EQ(plan.decode.seq_lens, (Lens{14, 24, 0}));
  expect_error(ErrorCode::invalid_argument, {"[4, 3]"}, [&] {
    make_plan(batch_of({4, 3}, {1, 1}), {}, options);
  });
  PlanTarget causal_only;
  causal_only.non_causal_decode = false;
  expect_error(ErrorCode::unsupported, {"variant.causal"},
               [&] { make_plan(batch, causal_only, options); });
}

TEST(Plan, ShortExtendWithContextIsADecode) {  // B185, F364
  PlanOptions options = options_of(64);
  options.split.support = QueryLenSupport::varlen;
  options.split.reorder_batch_threshold = 4;
  const BatchPlan plan = make_plan(batch_of({2, 2, 9}, {0, 50, 3}), {}, options);
  EXPECT_EQ(plan.split, (BatchSplit{2, 1, 4, 9}));
  EXPECT_EQ(plan.decode.max_query_len, 2);
  EXPECT_EQ(plan.decode.seq_lens, (Lens{2, 52}));
}

TEST(Plan, TwoGroupsPlanTheSameBatchByTheirOwnThreshold) {  // B184, F066
  PlanOptions draft = options_of(64);
  draft.split.support = QueryLenSupport::varlen;
  draft.split.reorder_batch_threshold = 4;
  const SequenceBatch batch = batch_of({1, 3}, {8, 8});
  EXPECT_EQ(make_plan(batch, {}, options_of(64)).split, (BatchSplit{1, 1, 1, 3}));
  EXPECT_EQ(make_plan(batch, {}, draft).split, (BatchSplit{2, 0, 4, 0}));
}

TEST(Plan, EmptyBatch) {
  SequenceBatch batch;
  batch.query_start_loc = {0};
  const BatchPlan plan = make_plan(batch, {}, options_of(64));
  EXPECT_EQ(plan.split, BatchSplit{});
  EXPECT_TRUE(plan.decode.items.empty());
  EXPECT_TRUE(plan.prefill.tiles.empty());
}

TEST(Plan, ContextIsSeqLenMinusQueryLen) {  // F002
  Random random(2);
  for (int round = 0; round < 2000; ++round) {
    Lens query_lens, context_lens;
    for (int i = random.between(0, 8); i > 0; --i) {
      query_lens.push_back(random.one_in(2) ? 1 : random.between(2, 40));
      context_lens.push_back(random.one_in(3) ? 0 : random.between(1, 300));
    }
    for (const auto& [a, b] : reorder_swaps(query_lens, {})) {
      std::swap(query_lens[std::size_t(a)], query_lens[std::size_t(b)]);
    }
    const ContextPlanKind kind = random.pick({ContextPlanKind::packed, ContextPlanKind::equal});
    const BatchPlan plan = make_plan(batch_of(query_lens, context_lens), {}, options_of(160, kind));
    const auto num_decodes = static_cast<std::size_t>(plan.split.num_decodes);
    EXPECT_EQ(plan.context_lens,
              Lens(context_lens.begin() + plan.split.num_decodes, context_lens.end()));
    for (std::size_t i = 0; i < num_decodes; ++i) {
      EXPECT_EQ(plan.decode.seq_lens[i], query_lens[i] + context_lens[i]);
    }
    std::int64_t gathered = 0, expected = 0;
    for (const ContextChunk& chunk : plan.chunks) {
      gathered += chunk.num_context_tokens;
      EXPECT_LE(chunk.num_context_tokens, plan.peak_context_rows);
    }
    for (const std::int32_t len : plan.context_lens) expected += len;
    EXPECT_EQ(gathered, expected);
    EXPECT_LE(plan.peak_context_rows, 160);
  }
}

TEST(Plan, BadBatchesAreNamed) {
  const auto plan = [](Lens query_start_loc, Lens seq_lens) {
    SequenceBatch batch;
    batch.query_start_loc = std::move(query_start_loc);
    batch.seq_lens = std::move(seq_lens);
    make_plan(batch, {}, {});
  };
  expect_error(ErrorCode::invalid_argument, {"query_start_loc is empty"}, [&] { plan({}, {}); });
  expect_error(ErrorCode::invalid_argument, {"query_start_loc has 2 entries", "3"}, [&] {
    plan({0, 1}, {1, 1});
  });
  expect_error(ErrorCode::invalid_argument, {"query_start_loc[1] is -1"}, [&] {
    plan({0, -1}, {1});
  });
  expect_error(ErrorCode::invalid_argument, {"seq_lens[1] is -5"}, [&] {
    plan({0, 1, 1}, {1, -5});
  });
  expect_error(ErrorCode::invalid_argument, {"seq_lens[1] is 2", "at least 3"}, [&] {
    plan({0, 1, 4}, {1, 2});
  });
  expect_error(ErrorCode::invalid_argument, {"query_start_loc", "decodes must come first"}, [&] {
    plan({0, 3, 4}, {3, 1});
  });
  SequenceBatch batch = batch_of({1, 2}, {0, 0});
  batch.is_prefilling = {1};
  expect_error(ErrorCode::invalid_argument, {"is_prefilling has 1 entries", "2"},
               [&] { make_plan(batch, {}, {}); });
}

TEST(Plan, BadOptionsAreNamed) {
  const SequenceBatch batch = batch_of({1, 4}, {9, 9});
  PlanOptions options;
  options.block_size = 0;
  expect_error(ErrorCode::invalid_argument, {"block_size is 0"},
               [&] { make_plan(batch, {}, options); });
  options = {};
  options.workspace_rows = std::int64_t{1} << 31;
  expect_error(ErrorCode::invalid_argument, {"workspace_rows is 2147483648"},
               [&] { make_plan(batch, {}, options); });
  PlanTarget target;
  target.prefill_query_tile = 0;
  expect_error(ErrorCode::invalid_argument, {"query_tile is 0"},
               [&] { make_plan(batch, target, {}); });
}

TEST(Plan, JsonHoldsWhatThePlanHolds) {
  PlanTarget target{.num_workers = 2};
  target.token_to_seq = true;
  PlanOptions options = options_of(64);
  options.parallel = ContextParallel{.ranks = 2, .rank = 1, .interleave = 4};
  const BatchPlan plan = make_plan(batch_of({1, 4, 4}, {299, 0, 100}), target, options);
  const auto json = nlohmann::json::parse(plan.to_json());
  EXPECT_EQ(json.at("split").at("num_prefill_tokens"), 8);
  EXPECT_EQ(json.at("decode").at("items").size(), plan.decode.items.size());
  EXPECT_EQ(json.at("decode").at("worker_begin").get<Lens>(), plan.decode.worker_begin);
  EXPECT_EQ(json.at("prefill").at("tiles").size(), plan.prefill.tiles.size());
  ASSERT_EQ(json.at("chunks").size(), 2u);
  for (std::size_t c = 0; c < 2; ++c) {
    const auto& chunk = json.at("chunks").at(c);
    EXPECT_EQ(chunk.at("token_to_seq").get<Lens>(), plan.chunks[c].token_to_seq);
    EXPECT_EQ(chunk.at("merge_end"), plan.chunks[c].merge_end);
    EXPECT_EQ(chunk.at("parallel").at("local_starts").get<Lens>(),
              plan.chunks[c].parallel->local_starts);
  }
  EXPECT_EQ(json.at("empty_token_slices"), nlohmann::json::parse("[[0, 4]]"));
}

}  // namespace
}  // namespace fovea::testing
