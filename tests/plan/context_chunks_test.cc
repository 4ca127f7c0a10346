#include <algorithm>

#include "plan/plan_testing.h"

namespace fovea::testing {
namespace {

ContextPlanInput random_input(Random& random) {
  ContextPlanInput input;
  input.kind = random.pick({ContextPlanKind::packed, ContextPlanKind::equal});
  input.block_size = random.pick({1, 4, 16});
  input.query_tile = random.pick({1, 4, 64});
  input.token_to_seq = true;
  if (input.kind == ContextPlanKind::packed && random.one_in(2)) {
    input.parallel = ContextParallel{
        .ranks = random.between(1, 4), .rank = 0, .interleave = random.pick({1, 4, 5})};
  }
  input.workspace_rows = 320 + random.between(0, 200);
  Lens query_lens;
  for (int i = random.between(1, 7); i > 0; --i) {
    query_lens.push_back(random.between(0, 9));
    input.context_lens.push_back(random.one_in(4) ? 0 : random.between(1, 700));
  }
  input.query_start_loc = offsets_of(query_lens);
  return input;
}

/// Every field that follows from the spans, row by row and token by token.
void check_fields(const ContextPlanInput& input, const std::vector<ContextSpan>& spans,
                  const ContextChunk& chunk) {
  ASSERT_EQ(chunk.requests, (IndexRange{spans.front().request, spans.back().request + 1}));
  ASSERT_EQ(static_cast<std::size_t>(chunk.requests.size()), spans.size());
  const Lens& offsets = input.query_start_loc;
  const std::int32_t base = offsets[std::size_t(chunk.requests.begin)];
  Lens token_to_seq, cu_k{0};
  std::int32_t max_query_len = 0, max_seq_len = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const auto r = static_cast<std::size_t>(spans[i].request);
    EXPECT_EQ(chunk.starts[i], spans[i].start);
    EXPECT_EQ(chunk.seq_lens[i], spans[i].seq_len);
    EXPECT_EQ(chunk.schedule.cu_seqlens_q[i], offsets[r] - base);
    for (std::int32_t t = 0; t < spans[i].seq_len; ++t) {
      token_to_seq.push_back(static_cast<std::int32_t>(i));
    }
    cu_k.push_back(static_cast<std::int32_t>(token_to_seq.size()));
    max_query_len = std::max(max_query_len, offsets[r + 1] - offsets[r]);
    max_seq_len = std::max(max_seq_len, spans[i].seq_len);
  }
  EXPECT_EQ(chunk.tokens, (IndexRange{base, offsets[std::size_t(chunk.requests.end)]}));
  EXPECT_EQ(chunk.schedule.cu_seqlens_q.back(), chunk.tokens.size());
  EXPECT_EQ(chunk.schedule.cu_seqlens_k, cu_k);
  EXPECT_EQ(chunk.token_to_seq, token_to_seq);
  EXPECT_EQ(chunk.num_context_tokens, static_cast<std::int32_t>(token_to_seq.size()));
  EXPECT_LE(chunk.num_context_tokens, input.workspace_rows);
  EXPECT_EQ(chunk.schedule.max_query_len, max_query_len);
  EXPECT_EQ(chunk.schedule.max_seq_len, max_seq_len);
  EXPECT_EQ(chunk.continuation_token_end, offsets[std::size_t(chunk.requests.begin) + 1]);
  EXPECT_EQ(chunk.is_continuation, spans.front().start > 0);
  EXPECT_EQ(chunk.parallel.has_value(), input.parallel.has_value());
  // Every query token sees all of the context: no mask makes later tiles longer.
  const AttentionVariant unmasked{.causal = false};
  EXPECT_EQ(chunk.schedule.tiles,
            schedule_prefill(chunk.schedule.cu_seqlens_q, cu_k, input.query_tile, unmasked).tiles);
}

TEST(ContextChunks, FieldsAreThoseOfCountingRowByRow) {  // F060, F104, F105, F107
  Random random(60);
  for (int round = 0; round < 2000; ++round) {
    const ContextPlanInput input = random_input(random);
    const auto spans = plan_context_spans(input);
    const auto chunks = plan_context_chunks(input);
    ASSERT_EQ(chunks.size(), spans.size());
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      EXPECT_EQ(chunks[c].index, static_cast<std::int32_t>(c));
      check_fields(input, spans[c], chunks[c]);
    }
  }
}

// What a layer does with the chunks, with "has a partial" in place of the partial.
TEST(ContextChunks, EveryTokenIsWrittenFirstAndMergedAfter) {  // F094, F121-F123
  Random random(94);
  for (int round = 0; round < 3000; ++round) {
    const ContextPlanInput input = random_input(random);
    Lens rows_seen(std::size_t(input.query_start_loc.back()), 0);
    std::vector<bool> has_partial(rows_seen.size(), false);
    for (const ContextChunk& chunk : plan_context_chunks(input)) {
      ASSERT_LE(chunk.tokens.begin, chunk.merge_end);
      ASSERT_LE(chunk.merge_end, chunk.tokens.end);
      for (std::int32_t i = 0; i < chunk.requests.size(); ++i) {
        const auto r = static_cast<std::size_t>(chunk.requests.begin + i);
        for (auto t = input.query_start_loc[r]; t < input.query_start_loc[r + 1]; ++t) {
          ASSERT_EQ(has_partial[std::size_t(t)], t < chunk.merge_end);
          has_partial[std::size_t(t)] = true;
          rows_seen[std::size_t(t)] += chunk.seq_lens[std::size_t(i)];
        }
      }
      if (input.kind == ContextPlanKind::packed && chunk.merge_end > chunk.tokens.begin) {
        ASSERT_TRUE(chunk.is_continuation);
        ASSERT_EQ(chunk.merge_end, chunk.continuation_token_end);
      }
    }
    for (std::size_t r = 0; r < input.context_lens.size(); ++r) {
      for (auto t = input.query_start_loc[r]; t < input.query_start_loc[r + 1]; ++t) {
        ASSERT_EQ(rows_seen[std::size_t(t)], input.context_lens[r]);
      }
    }
  }
}

/// Deals out every context token and finds it in the rows that its rank gathers.
void check_ownership(const ContextPlanInput& input, const ContextChunk& chunk) {
  const ContextParallel& parallel = *input.parallel;
  const ContextParallelChunk& local = *chunk.parallel;
  Lens token_to_seq;
  for (std::size_t i = 0; i < chunk.starts.size(); ++i) {
    const std::size_t r = static_cast<std::size_t>(chunk.requests.begin) + i;
    Lens owned(std::size_t(parallel.ranks), 0);
    for (std::int32_t t = 0; t < input.context_lens[r]; ++t) {
      const std::int32_t row = owned[std::size_t(t / parallel.interleave % parallel.ranks)]++;
      const bool in_chunk = t >= chunk.starts[i] && t < chunk.starts[i] + chunk.seq_lens[i];
      const bool gathered = row >= local.local_starts[i] &&
                            row < local.local_starts[i] + local.padded_local_seq_lens[i];
      ASSERT_EQ(in_chunk, gathered) << "token " << t << " of request " << r;
    }
    ASSERT_EQ(local.local_context_lens_all_ranks[i], owned);
    ASSERT_EQ(local.padded_local_cu_seq_lens[i], static_cast<std::int32_t>(token_to_seq.size()));
    token_to_seq.insert(token_to_seq.end(), std::size_t(local.padded_local_seq_lens[i]),
                        static_cast<std::int32_t>(i));
  }
  ASSERT_EQ(local.padded_local_cu_seq_lens.back(), static_cast<std::int32_t>(token_to_seq.size()));
  ASSERT_EQ(local.padded_local_token_to_seq, token_to_seq);
  ASSERT_EQ(local.num_local_context_tokens, static_cast<std::int32_t>(token_to_seq.size()));
  ASSERT_LE(local.num_local_context_tokens, input.workspace_rows / parallel.ranks);
}

TEST(ContextChunks, RanksGatherExactlyTheirTokensOfAChunk) {  // F103, F106
  Random random(106);
  int checked = 0;
  while (checked < 2000) {
    const ContextPlanInput input = random_input(random);
    if (!input.parallel) continue;
    for (const ContextChunk& chunk : plan_context_chunks(input)) {
      check_ownership(input, chunk);
      ++checked;
    }
  }
}

TEST(ContextChunks, RowArraysAreFilledOnRequestOnly) {
  ContextPlanInput input;
  input.context_lens = {40};
  input.query_start_loc = {0, 3};
  input.workspace_rows = 64;
  input.parallel = ContextParallel{.ranks = 2, .rank = 0, .interleave = 1};
  for (const bool wanted : {false, true}) {
    input.token_to_seq = wanted;
    const ContextChunk chunk = plan_context_chunks(input).at(0);
    EXPECT_EQ(chunk.token_to_seq.size(), wanted ? 40u : 0u);
    EXPECT_EQ(chunk.parallel->padded_local_token_to_seq.size(), wanted ? 20u : 0u);
  }
}

TEST(ContextChunks, OffsetsMustFitTheContexts) {
  ContextPlanInput input;
  input.context_lens = {40, 2};
  input.query_start_loc = {0, 3};
  input.workspace_rows = 64;
  expect_error(ErrorCode::invalid_argument, {"query_start_loc has 2 entries", "3"},
               [&] { plan_context_chunks(input); });
}

}  // namespace
}  // namespace fovea::testing
