// Plans of windows, attention chunks and draft trees: what is left out, and where rows stand.
#include <algorithm>
#include <limits>

#include "plan/plan_testing.h"

namespace fovea::testing {
namespace {

/// The first key that the first of `query_len` tokens at the end of `seq_len` sees.
std::int32_t first_visible(const AttentionVariant& variant, std::int32_t query_len,
                           std::int32_t seq_len) {
  const std::int32_t position = std::max(seq_len - query_len, 0);
  std::int32_t first = 0;
  if (variant.window_left >= 0) {
    first = std::max(first, position - static_cast<std::int32_t>(variant.window_left));
  }
  if (variant.attention_chunk > 0) {
    first =
        std::max(first, position - position % static_cast<std::int32_t>(variant.attention_chunk));
  }
  return first;
}

AttentionVariant random_variant(Random& random) {
  AttentionVariant variant;
  if (random.one_in(2)) variant.window_left = random.between(0, 300);
  if (random.one_in(2)) variant.attention_chunk = random.between(1, 300);
  return variant;
}

TEST(VariantPlans, DecodeItemsStartAtTheTileOfTheFirstVisibleKey) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    Lens query_lens, seq_lens;
    for (int i = random.between(1, 6); i > 0; --i) {
      query_lens.push_back(random.between(0, 4));
      seq_lens.push_back(random.between(query_lens.back(), 900));
    }
    const AttentionVariant variant = random_variant(random);
    const PlanTarget target{.num_workers = random.between(1, 9),
                            .decode_kv_tile = random.pick({1, 16, 64})};
    const DecodeSchedule schedule =
        schedule_decode(offsets_of(query_lens), seq_lens, target, variant);
    std::vector<std::int32_t> covered(seq_lens.size(), -1);
    for (const WorkItem& item : schedule.items) {
      const auto r = static_cast<std::size_t>(item.request);
      const std::int32_t first = first_visible(variant, query_lens[r], seq_lens[r]) /
                                 target.decode_kv_tile * target.decode_kv_tile;
      ASSERT_EQ(item.kv_begin, covered[r] < 0 ? first : covered[r]);
      covered[r] = item.kv_end;
    }
    for (std::size_t r = 0; r < seq_lens.size(); ++r) {
      ASSERT_EQ(covered[r], query_lens[r] > 0 ? seq_lens[r] : -1);
    }
  }
}

TEST(VariantPlans, WhatAWindowLeavesOutIsNobodysWork) {
  // 1000 and 64 keys are the same work when both windows reach 64 keys back.
  const DecodeSchedule schedule = schedule_decode(
      Lens{0, 1, 2}, Lens{1024, 64}, {.num_workers = 2, .decode_kv_tile = 16}, {.window_left = 63});
  EXPECT_EQ(schedule.items, (std::vector<WorkItem>{{0, 960, 1024, -1}, {1, 0, 64, -1}}));
  EXPECT_EQ(schedule.worker_begin, (Lens{0, 1, 2}));
}

TEST(VariantPlans, ADraftsDepthDecidesWhereItsWindowStarts) {
  // Three siblings at position 97: as rows they would stand at 97, 98 and 99.
  const std::vector<std::uint64_t> siblings{1, 2, 4}, chain{1, 3, 7};
  const PlanTarget target{.num_workers = 1, .decode_kv_tile = 1};
  const auto begin = [&](const std::vector<std::uint64_t>& tree) {
    const DecodeSchedule schedule =
        schedule_decode(Lens{0, 3}, Lens{100}, target, {.attention_chunk = 98}, tree);
    EXPECT_EQ(schedule.draft_tree, tree);
    return schedule.items.front().kv_begin;
  };
  EXPECT_EQ(begin(siblings), 0);
  EXPECT_EQ(begin(chain), 0);  // Its first token stands at 97 too.
  const DecodeSchedule later =
      schedule_decode(Lens{0, 3}, Lens{101}, target, {.attention_chunk = 98}, siblings);
  EXPECT_EQ(later.items.front().kv_begin, 98);
}

TEST(VariantPlans, WrongTreesAndVariantsAreRefused) {
  const auto plan = [](const std::vector<std::uint64_t>& tree, std::int32_t seq_len,
                       const AttentionVariant& variant = {}) {
    const auto tokens = static_cast<std::int32_t>(tree.size());
    schedule_decode(Lens{0, tokens}, Lens{seq_len}, {}, variant, tree);
  };
  const ErrorCode invalid = ErrorCode::invalid_argument, unsupported = ErrorCode::unsupported;
  plan({1, 3, 5}, 3);
  expect_error(invalid, {"draft_tree of request 0, token 1 is 0x1", "own bit 1"}, [&] {
    plan({1, 1}, 9);
  });
  expect_error(invalid, {"token 0 is 0x3", "tokens before it"}, [&] { plan({3, 2}, 9); });
  expect_error(invalid, {"seq_lens[0] is 2", "at least 3"}, [&] { plan({1, 2, 4}, 2); });
  expect_error(unsupported, {"causal"}, [&] { plan({1, 3}, 9, {.causal = false}); });
  expect_error(unsupported, {"has 65 tokens", "64"},
               [&] { plan(std::vector<std::uint64_t>(65, 1), 99); });
  expect_error(invalid, {"draft_tree has 1 entries", "must have 2"}, [&] {
    schedule_decode(Lens{0, 2}, Lens{9}, {}, {}, std::vector<std::uint64_t>{1});
  });
  expect_error(invalid, {"attention_chunk is -1"}, [&] { plan({}, 9, {.attention_chunk = -1}); });
  expect_error(unsupported, {"attention_chunk is 4", "causal"},
               [&] { plan({}, 9, {.causal = false, .attention_chunk = 4}); });
  for (float cap : {-1.f, std::numeric_limits<float>::infinity()}) {
    expect_error(invalid, {"soft_cap is"}, [&] { plan({}, 9, {.soft_cap = cap}); });
  }
}

TEST(VariantPlans, PrefillTilesWeighWhatTheirWindowsSee) {
  // Causal tiles of one request grow, so that the last runs first; in a window all weigh the same
  // but for the first, whose window is cut off by the start.
  const auto begins = [](const AttentionVariant& variant, PrefillPositions positions = {}) {
    Lens result;
    for (const PrefillTile& tile :
         schedule_prefill(Lens{0, 40}, Lens{0, 40}, 10, variant, std::move(positions)).tiles) {
      result.push_back(tile.query_begin);
    }
    return result;
  };
  EXPECT_EQ(begins({}), (Lens{30, 20, 10, 0}));
  EXPECT_EQ(begins({.window_left = 4}), (Lens{10, 20, 30, 0}));
  // The same keys as a slice of context far before the queries: all see all of it, or less and
  // less.
  EXPECT_EQ(begins({}, {{100}, {0}}), (Lens{0, 10, 20, 30}));
  EXPECT_EQ(begins({.window_left = 90}, {{100}, {0}}), (Lens{0, 10, 20, 30}));
  EXPECT_EQ(begins({.window_left = 20}, {{100}, {80}}), (Lens{0, 10, 20, 30}));
}

TEST(VariantPlans, PositionsComeInPairs) {
  const PrefillSchedule schedule =
      schedule_prefill(Lens{0, 2, 5}, Lens{0, 4, 6}, 8, {}, {{10, 20}, {6, 3}});
  EXPECT_EQ(schedule.first_query, (std::vector<std::int32_t>{10, 20}));
  EXPECT_EQ(schedule.first_key, (std::vector<std::int32_t>{6, 3}));
  expect_error(ErrorCode::invalid_argument, {"1 first queries and 2 first keys", "2 requests"},
               [&] {
                 schedule_prefill(Lens{0, 2, 5}, Lens{0, 4, 6}, 8, {}, {{10}, {6, 3}});
               });
}

TEST(VariantPlans, ContextBeforeEveryWindowIsNotGathered) {
  for (ContextPlanKind kind : {ContextPlanKind::packed, ContextPlanKind::equal}) {
    ContextPlanInput input;
    input.kind = kind;
    input.variant.window_left = 20;
    input.context_lens = {100, 10, 37};
    input.query_start_loc = {0, 3, 5, 6};
    input.workspace_rows = 1000;
    input.block_size = 16;
    const std::vector<ContextChunk> chunks = plan_context_chunks(input);
    ASSERT_EQ(chunks.size(), 1u);
    const ContextChunk& chunk = chunks.front();
    // Keys from 80, 0 and 17 on are seen; blocks start at 80, 0 and 16.
    std::vector<std::int32_t> starts, first_query;
    for (std::size_t i = 0; i < chunk.starts.size(); ++i) {
      starts.push_back(chunk.starts[i]);
      first_query.push_back(chunk.schedule.first_query[i]);
      EXPECT_EQ(chunk.schedule.first_key[i], chunk.starts[i]);
      EXPECT_EQ(chunk.starts[i] + chunk.seq_lens[i], chunk.schedule.first_query[i]);
    }
    EXPECT_EQ(starts, (std::vector<std::int32_t>{80, 0, 16}));
    EXPECT_EQ(first_query, (std::vector<std::int32_t>{100, 10, 37}));
    EXPECT_EQ(chunk.num_context_tokens, 20 + 10 + 21);
  }
}

TEST(VariantPlans, RequestsWhoseWindowsEndInTheirNewTokensSeeNoContext) {
  SequenceBatch batch;
  batch.query_start_loc = {0, 5, 9};
  batch.seq_lens = {69, 34};  // Contexts of 64 and 30; the first ends a chunk.
  PlanOptions options;
  options.variant.attention_chunk = 64;
  const BatchPlan plan = make_plan(batch, {}, options);
  ASSERT_EQ(plan.chunks.size(), 1u);
  EXPECT_EQ(plan.chunks.front().requests, (IndexRange{1, 2}));
  EXPECT_EQ(plan.empty_token_slices, (std::vector<IndexRange>{{0, 5}}));
  // New tokens stand behind their context.
  EXPECT_EQ(plan.prefill.first_query, (std::vector<std::int32_t>{64, 30}));
  EXPECT_EQ(plan.prefill.first_key, (std::vector<std::int32_t>{64, 30}));
}

TEST(VariantPlans, PagedPlansAttendToWholeSequences) {
  SequenceBatch batch;
  batch.query_start_loc = {0, 1, 6, 9};
  batch.seq_lens = {50, 69, 3};
  PlanOptions options;
  options.context_plan = ContextPlanKind::paged;
  options.workspace_rows = 0;
  const BatchPlan plan = make_plan(batch, {}, options);
  EXPECT_TRUE(plan.paged_context);
  EXPECT_TRUE(plan.chunks.empty());
  EXPECT_TRUE(plan.empty_token_slices.empty());
  EXPECT_EQ(plan.peak_context_rows, 0);
  EXPECT_EQ(plan.prefill.cu_seqlens_q, (Lens{0, 5, 8}));
  EXPECT_EQ(plan.prefill.cu_seqlens_k, (Lens{0, 69, 72}));
  EXPECT_TRUE(plan.prefill.first_query.empty());
}

TEST(VariantPlans, DecodesKeepTheirPartOfTheDraftTree) {
  SequenceBatch batch;
  batch.query_start_loc = {0, 2, 4, 9};
  batch.seq_lens = {50, 20, 5};
  batch.draft_tree = {1, 3, 1, 2, 1, 3, 7, 15, 31};
  PlanOptions options;
  options.split = {.reorder_batch_threshold = 2, .support = QueryLenSupport::uniform};
  EXPECT_EQ(make_plan(batch, {}, options).decode.draft_tree,
            (std::vector<std::uint64_t>{1, 3, 1, 2}));
  batch.draft_tree.pop_back();
  expect_error(ErrorCode::invalid_argument, {"draft_tree has 8 entries", "must have 9"},
               [&] { make_plan(batch, {}, options); });
}

}  // namespace
}  // namespace fovea::testing
