#include "plan/context_spans.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "plan/plan_testing.h"

namespace fovea {

void PrintTo(const ContextSpan& span, std::ostream* out) {
  *out << "r" << span.request << ":(" << span.start << "," << span.seq_len << ")";
}

namespace testing {
namespace {

using Chunks = std::vector<std::vector<ContextSpan>>;

ContextPlanInput input_of(ContextPlanKind kind, Lens context_lens, std::int64_t rows,
                          std::int64_t block_size = 16) {
  ContextPlanInput input;
  input.kind = kind;
  input.context_lens = std::move(context_lens);
  input.workspace_rows = rows;
  input.block_size = block_size;
  return input;
}

Chunks packed(Lens context_lens, std::int64_t rows, std::int64_t block_size = 16) {
  return plan_context_spans(
      input_of(ContextPlanKind::packed, std::move(context_lens), rows, block_size));
}

std::int64_t alignment_of(const ContextPlanInput& input) {
  const std::int64_t alignment = input.align_chunk_to_block ? input.block_size : 1;
  if (!input.parallel) return alignment;
  return std::lcm(alignment, std::int64_t{input.parallel->ranks} * input.parallel->interleave);
}

// ---------------------------------------------------------------- equal shares

TEST(EqualSpans, KnownExample) {  // F079, F080
  const Chunks chunks =
      plan_context_spans(input_of(ContextPlanKind::equal, {100, 0, 50, 300}, 256));
  const Lens lens[] = {{80, 0, 50, 80}, {20, 0, 0, 80}, {0, 0, 0, 80}, {0, 0, 0, 60}};
  ASSERT_EQ(chunks.size(), 4u);
  for (std::size_t c = 0; c < 4; ++c) {
    ASSERT_EQ(chunks[c].size(), 4u);
    for (std::int32_t r = 0; r < 4; ++r) {
      const ContextSpan expected{r, static_cast<std::int32_t>(c) * 80, lens[c][std::size_t(r)]};
      EXPECT_EQ(chunks[c][std::size_t(r)], expected);
    }
  }
}

TEST(EqualSpans, TotalRowsFitAndSharesAreWholeBlocks) {  // F082, F083, F349
  Random random(82);
  for (int round = 0; round < 3000; ++round) {
    Lens lens;
    for (int i = random.between(1, 8); i > 0; --i) {
      lens.push_back(random.one_in(3) ? 0 : random.between(0, 500));
    }
    const std::int64_t block_size = random.pick({1, 3, 16});
    const auto input =
        input_of(ContextPlanKind::equal, lens, 8 * block_size + random.between(0, 300), block_size);
    const Chunks chunks = plan_context_spans(input);
    Lens covered(lens.size(), 0);
    for (const auto& chunk : chunks) {
      ASSERT_EQ(chunk.size(), lens.size());
      std::int64_t rows = 0;
      for (const ContextSpan& span : chunk) {
        rows += span.seq_len;
        EXPECT_EQ(span.start % block_size, 0);
        if (span.seq_len > 0) {
          EXPECT_EQ(span.start, covered[std::size_t(span.request)]);
        }
        covered[std::size_t(span.request)] += span.seq_len;
      }
      EXPECT_GT(rows, 0);
      EXPECT_LE(rows, input.workspace_rows);
    }
    EXPECT_EQ(covered, lens);
  }
}

TEST(EqualSpans, AWorkspaceWithoutABlockPerContextIsRefused) {
  const auto plan = [](std::int64_t rows) {
    return plan_context_spans(input_of(ContextPlanKind::equal, {40, 0, 40, 40}, rows));
  };
  EXPECT_NO_THROW(plan(48));
  expect_error(ErrorCode::invalid_argument, {"workspace_rows is 47", "48", "3 prefills"},
               [&] { plan(47); });
}

// ---------------------------------------------------------------- packed

TEST(PackedSpans, KnownExamples) {
  struct Case {
    Lens context_lens;
    std::int64_t rows;
    Chunks chunks;
  };
  const Case cases[] = {
      // F087: whole, whole and cut, rest.
      {{100, 0, 50, 300}, 256, {{{0, 0, 100}}, {{2, 0, 50}, {3, 0, 192}}, {{3, 192, 108}}}},
      // F086: a request without context ends a chunk, though both neighbours would fit.
      {{10, 0, 10}, 256, {{{0, 0, 10}}, {{2, 0, 10}}}},
      // F090: a full chunk leaves no row for the next request.
      {{255, 1, 1000},
       256,
       {{{0, 0, 255}, {1, 0, 1}},
        {{2, 0, 256}},
        {{2, 256, 256}},
        {{2, 512, 256}},
        {{2, 768, 232}}}},
      // Less than a block left: closed without a piece.
      {{245, 30}, 256, {{{0, 0, 245}}, {{1, 0, 30}}}},
      // F095: rows beyond the last whole block serve whole contexts only.
      {{250}, 250, {{{0, 0, 250}}}},
      {{251}, 250, {{{0, 0, 240}}, {{0, 240, 11}}}},
      // F096: cut on both sides.
      {{600}, 256, {{{0, 0, 256}}, {{0, 256, 256}}, {{0, 512, 88}}}},
  };
  for (const Case& c : cases) EXPECT_EQ(packed(c.context_lens, c.rows), c.chunks);
}

TEST(PackedSpans, NothingWithoutContext) {  // F078, F098
  for (const ContextPlanKind kind : {ContextPlanKind::packed, ContextPlanKind::equal}) {
    EXPECT_TRUE(plan_context_spans(input_of(kind, {}, 256)).empty());
    EXPECT_TRUE(plan_context_spans(input_of(kind, {0, 0}, 256)).empty());
    EXPECT_TRUE(plan_context_spans(input_of(kind, {0}, 0)).empty());
  }
}

TEST(PackedSpans, SplitsAnywhereWithoutAlignment) {  // F099
  ContextPlanInput input = input_of(ContextPlanKind::packed, {100, 300}, 250);
  EXPECT_EQ(plan_context_spans(input), (Chunks{{{0, 0, 100}, {1, 0, 144}}, {{1, 144, 156}}}));
  input.align_chunk_to_block = false;
  EXPECT_EQ(plan_context_spans(input), (Chunks{{{0, 0, 100}, {1, 0, 150}}, {{1, 150, 150}}}));
}

TEST(PackedSpans, BadInputIsNamed) {  // F085, F101
  expect_error(ErrorCode::invalid_argument, {"workspace_rows is 15", "at least 16"},
               [] { packed({4}, 15); });
  expect_error(ErrorCode::invalid_argument, {"workspace_rows is -1"}, [] { packed({4}, -1); });
  expect_error(ErrorCode::invalid_argument, {"block_size is 0"}, [] { packed({4}, 16, 0); });
  expect_error(ErrorCode::invalid_argument, {"context_lens[1] is -3"}, [] { packed({4, -3}, 16); });
  ContextPlanInput input = input_of(ContextPlanKind::packed, {4}, 63);
  input.parallel = ContextParallel{.ranks = 4, .rank = 0, .interleave = 16};
  expect_error(ErrorCode::invalid_argument, {"workspace_rows is 63", "at least 64"},
               [&] { plan_context_spans(input); });
  input.workspace_rows = 64;
  input.parallel->rank = 4;
  expect_error(ErrorCode::invalid_argument, {"parallel.rank is 4"},
               [&] { plan_context_spans(input); });
  input.parallel = ContextParallel{};
  input.kind = ContextPlanKind::equal;
  expect_error(ErrorCode::unsupported, {"parallel", "packed"}, [&] { plan_context_spans(input); });
}

/// Rows per rank of context [begin, end) by dealing out every token: all ranks keep as many as rank
/// 0 once the last turn is filled up.
std::int64_t dealt_rows(const ContextPlanInput& input, std::int64_t begin, std::int64_t end) {
  if (!input.parallel) return end - begin;
  const std::int64_t turn = std::int64_t{input.parallel->ranks} * input.parallel->interleave;
  const auto padded = [&](std::int64_t length) {
    std::int64_t filled = length;
    while (filled % turn != 0) ++filled;
    std::int64_t rows = 0;
    for (std::int64_t t = 0; t < filled; ++t) {
      rows += t / input.parallel->interleave % input.parallel->ranks == 0 ? 1 : 0;
    }
    return rows;
  };
  return padded(end) - padded(begin);
}

/// The packed plan by trying every length.
Chunks pack_by_trial(const ContextPlanInput& input) {
  const std::int64_t budget =
      input.parallel ? input.workspace_rows / input.parallel->ranks : input.workspace_rows;
  const std::int64_t alignment = alignment_of(input);
  Chunks chunks;
  std::vector<ContextSpan> open;
  std::int64_t free = budget;
  const auto close = [&] {
    if (!open.empty()) chunks.push_back(std::move(open));
    open.clear();
    free = budget;
  };
  for (std::size_t r = 0; r < input.context_lens.size(); ++r) {
    const std::int64_t context = input.context_lens[r];
    if (context == 0) close();
    for (std::int64_t start = 0; start < context;) {
      std::int64_t best = 0;
      for (std::int64_t len = 1; len <= context - start; ++len) {
        const bool whole = len == context - start;
        const bool allowed = whole || (len % alignment == 0 && len <= input.workspace_rows);
        if (allowed && dealt_rows(input, start, start + len) <= free) best = len;
      }
      if (best > 0) {
        open.push_back({static_cast<std::int32_t>(r), static_cast<std::int32_t>(start),
                        static_cast<std::int32_t>(best)});
        free -= dealt_rows(input, start, start + best);
        start += best;
      }
      if (start < context) close();
    }
  }
  close();
  return chunks;
}

TEST(PackedSpans, SameAsTryingEveryLength) {  // F088, F089, F091
  Random random(89);
  for (int round = 0; round < 400; ++round) {
    ContextPlanInput input = input_of(ContextPlanKind::packed, {}, 0, random.pick({1, 3, 4, 16}));
    input.align_chunk_to_block = !random.one_in(4);
    if (random.one_in(2)) {
      input.parallel = ContextParallel{
          .ranks = random.between(1, 4), .rank = 0, .interleave = random.pick({1, 2, 4})};
    }
    input.workspace_rows = alignment_of(input) + random.between(0, 60);
    for (int i = random.between(0, 6); i > 0; --i) {
      input.context_lens.push_back(random.one_in(4) ? 0 : random.between(0, 90));
    }
    EXPECT_EQ(plan_context_spans(input), pack_by_trial(input))
        << ::testing::PrintToString(input.context_lens) << " in " << input.workspace_rows;
  }
}

TEST(PackedSpans, KeepTheirPromises) {  // F091, F093
  Random random(93);
  for (int round = 0; round < 20000; ++round) {
    ContextPlanInput input =
        input_of(ContextPlanKind::packed, {}, 0, random.pick({1, 7, 16, 64, 100}));
    if (random.one_in(3)) {
      input.parallel = ContextParallel{
          .ranks = random.between(1, 8), .rank = 0, .interleave = random.pick({1, 4, 16})};
    }
    const std::int64_t alignment = alignment_of(input);
    input.workspace_rows = alignment + random.between(0, 1000);
    for (int i = random.between(0, 9); i > 0; --i) {
      input.context_lens.push_back(random.one_in(4) ? 0 : random.between(1, 3000));
    }
    const std::int64_t budget =
        input.parallel ? input.workspace_rows / input.parallel->ranks : input.workspace_rows;
    Lens covered(input.context_lens.size(), 0);
    for (const auto& chunk : plan_context_spans(input)) {
      ASSERT_FALSE(chunk.empty());
      std::int64_t rows = 0;
      for (std::size_t i = 0; i < chunk.size(); ++i) {
        const ContextSpan& span = chunk[i];
        const auto r = static_cast<std::size_t>(span.request);
        const std::int32_t end = span.start + span.seq_len;
        ASSERT_EQ(span.start, covered[r]);  // I1: contiguous, disjoint
        ASSERT_GT(span.seq_len, 0);         // I2, I8
        if (i > 0) {                        // I3
          ASSERT_EQ(span.start, 0);
        }
        if (i + 1 < chunk.size()) {  // I4
          ASSERT_EQ(end, input.context_lens[r]);
        }
        ASSERT_EQ(span.start % alignment, 0);  // I6
        if (i > 0) {                           // I7
          ASSERT_EQ(span.request, chunk[i - 1].request + 1);
        }
        if (input.parallel) {
          rows += padded_local_length(end, *input.parallel) -
                  padded_local_length(span.start, *input.parallel);
        } else {
          rows += span.seq_len;
        }
        covered[r] = end;
      }
      ASSERT_LE(rows, budget);  // I5
    }
    ASSERT_EQ(covered, input.context_lens);  // I1: everything
  }
}

TEST(ContextSpans, EqualAndPackedCoverTheSamePositions) {  // F324
  Random random(324);
  for (int round = 0; round < 500; ++round) {
    Lens lens;
    for (int i = random.between(1, 6); i > 0; --i) {
      lens.push_back(random.one_in(3) ? 0 : random.between(1, 200));
    }
    std::vector<std::pair<std::int32_t, std::int32_t>> positions[2];
    for (const ContextPlanKind kind : {ContextPlanKind::packed, ContextPlanKind::equal}) {
      auto& seen = positions[kind == ContextPlanKind::equal ? 1 : 0];
      for (const auto& chunk :
           plan_context_spans(input_of(kind, lens, 96 + random.between(0, 99)))) {
        for (const ContextSpan& span : chunk) {
          for (std::int32_t i = 0; i < span.seq_len; ++i) {
            seen.emplace_back(span.request, span.start + i);
          }
        }
      }
      std::sort(seen.begin(), seen.end());
    }
    EXPECT_EQ(positions[0], positions[1]);
  }
}

TEST(ContextSpans, OneLongContextCostsThePackedPlanFewerQueryRows) {  // F097
  const Lens lens{16, 16, 16, 2000};
  const auto requests_run = [](const Chunks& chunks) {
    std::size_t requests = 0;
    for (const auto& chunk : chunks) requests += chunk.size();
    return requests;
  };
  const Chunks equal = plan_context_spans(input_of(ContextPlanKind::equal, lens, 256));
  EXPECT_EQ(equal.size(), 32u);
  EXPECT_EQ(requests_run(equal), 4u * 32u);
  EXPECT_EQ(packed(lens, 256).size(), 8u);
  EXPECT_EQ(requests_run(packed(lens, 256)), 3u + 8u);
}

// ---------------------------------------------------------------- context parallelism

TEST(ContextParallel, PaddedLengths) {  // F100
  const ContextParallel parallel{.ranks = 2, .rank = 0, .interleave = 4};
  const std::int64_t lengths[] = {0, 1, 4, 5, 9, 16, 37, 100};
  const std::int64_t rows[] = {0, 4, 4, 4, 8, 8, 20, 52};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(padded_local_length(lengths[i], parallel), rows[i]);
}

TEST(ContextParallel, LengthsAreThoseOfDealingOutEveryToken) {  // F103
  for (std::int32_t ranks = 1; ranks <= 5; ++ranks) {
    for (const std::int32_t interleave : {1, 3, 4, 16}) {
      const ContextParallel parallel{.ranks = ranks, .rank = 0, .interleave = interleave};
      Lens owned(std::size_t(ranks), 0);
      for (std::int32_t length = 0; length <= 200; ++length) {
        for (std::int32_t rank = 0; rank < ranks; ++rank) {
          ASSERT_EQ(local_length(length, parallel, rank), owned[std::size_t(rank)]);
          ASSERT_GE(padded_local_length(length, parallel), owned[std::size_t(rank)]);
        }
        ++owned[std::size_t(length / interleave % ranks)];
      }
    }
  }
  const ContextParallel two{.ranks = 2, .rank = 0, .interleave = 4};
  EXPECT_EQ(local_length(9, two, 0), 5);
  EXPECT_EQ(local_length(9, two, 1), 4);
  EXPECT_EQ(padded_local_length(9, two), 8);
}

// Not those of the length alone: a span that starts inside a turn shares its row with the one
// before.
TEST(ContextParallel, SpanRowsAreTheDifferenceOfPaddedLengths) {  // F088
  ContextPlanInput input;
  input.parallel = ContextParallel{.ranks = 2, .rank = 0, .interleave = 4};
  EXPECT_EQ(span_rows(input, 0, 3), 4);
  EXPECT_EQ(span_rows(input, 3, 5), 0);
  EXPECT_EQ(span_rows(input, 3, 6), 4);
  EXPECT_EQ(span_rows(input, 8, 5), 4);
  for (std::int64_t start = 0; start < 40; ++start) {
    for (std::int64_t seq_len = 0; seq_len < 40; ++seq_len) {
      ASSERT_EQ(span_rows(input, start, seq_len), dealt_rows(input, start, start + seq_len));
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace fovea
