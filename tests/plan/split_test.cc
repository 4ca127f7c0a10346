#include <algorithm>
#include <utility>

#include "plan/plan_testing.h"

namespace fovea::testing {
namespace {

using Swaps = std::vector<std::pair<std::int32_t, std::int32_t>>;

SplitPolicy policy_of(QueryLenSupport support, std::int32_t threshold) {
  SplitPolicy policy;
  policy.support = support;
  policy.reorder_batch_threshold = threshold;
  return policy;
}

BatchSplit split_of(const Lens& query_lens, const SplitPolicy& policy,
                    const std::vector<std::uint8_t>& is_prefilling = {}) {
  return split_decodes_and_prefills(offsets_of(query_lens), policy, is_prefilling);
}

TEST(Reorder, SwapsOfTheKnownExample) {  // F049
  const Swaps swaps = reorder_swaps(Lens{5, 1, 7, 1, 1}, {});
  EXPECT_EQ(swaps, (Swaps{{0, 4}, {2, 3}}));
  Lens order{0, 1, 2, 3, 4};
  for (const auto& [a, b] : swaps) std::swap(order[std::size_t(a)], order[std::size_t(b)]);
  EXPECT_EQ(order, (Lens{4, 1, 3, 2, 0}));
}

// A swap brings at most one decode forward, so that no fewer than the decodes behind the border do.
TEST(Reorder, EveryPatternUpToNineEndsOrderedWithTheFewestSwaps) {  // F048
  for (std::size_t n = 0; n <= 9; ++n) {
    for (unsigned pattern = 0; pattern < (1u << n); ++pattern) {
      Lens lens;
      for (std::size_t i = 0; i < n; ++i) lens.push_back((pattern >> i & 1u) != 0 ? 1 : 6);
      const auto num_decodes = std::count(lens.begin(), lens.end(), 1);
      const auto misplaced = std::count(lens.begin() + num_decodes, lens.end(), 1);
      const Swaps swaps = reorder_swaps(lens, {});
      EXPECT_EQ(static_cast<std::ptrdiff_t>(swaps.size()), misplaced);
      for (const auto& [a, b] : swaps) std::swap(lens[std::size_t(a)], lens[std::size_t(b)]);
      EXPECT_TRUE(std::is_sorted(lens.begin(), lens.end())) << "pattern " << pattern;
    }
  }
}

TEST(Reorder, OrdersByTheThreshold) {
  EXPECT_EQ(reorder_swaps(Lens{5, 3, 4}, policy_of(QueryLenSupport::varlen, 4)), (Swaps{{0, 2}}));
  EXPECT_TRUE(reorder_swaps(Lens{5, 3, 4}, policy_of(QueryLenSupport::varlen, 8)).empty());
}

TEST(Reorder, ShortExtendsStayPrefillsWhenThePolicySaysSo) {
  SplitPolicy policy;
  policy.treat_short_extends_as_decodes = false;
  const std::vector<std::uint8_t> is_prefilling{1, 0, 1};
  EXPECT_EQ(reorder_swaps(Lens{1, 1, 9}, policy, is_prefilling), (Swaps{{0, 1}}));
  expect_error(ErrorCode::invalid_argument, {"is_prefilling", "3"}, [&] {
    reorder_swaps(Lens{1, 1, 9}, policy);
  });
}

TEST(Split, OneTokenIsADecodeEvenWithoutContext) {  // F047, F364
  EXPECT_EQ(split_of({1, 1, 7, 3}, {}), (BatchSplit{2, 2, 2, 10}));
  EXPECT_EQ(split_of({1, 1}, {}), (BatchSplit{2, 0, 2, 0}));
  EXPECT_EQ(split_of({4, 2}, {}), (BatchSplit{0, 2, 0, 6}));
  EXPECT_EQ(split_of({}, {}), BatchSplit{});
}

TEST(Split, QueryLengthSupportDecidesWhatAThresholdOfFourTakes) {  // F053, F326
  const SplitPolicy uniform = policy_of(QueryLenSupport::uniform, 4);
  const SplitPolicy varlen = policy_of(QueryLenSupport::varlen, 4);
  struct Case {
    Lens lens;
    BatchSplit uniform;
    BatchSplit varlen;
  };
  const Case cases[] = {
      {{4, 4, 4, 1}, {3, 1, 12, 1}, {4, 0, 13, 0}},
      {{4, 4, 4}, {3, 0, 12, 0}, {3, 0, 12, 0}},
      {{2, 2, 9}, {2, 1, 4, 9}, {2, 1, 4, 9}},
      {{4, 1, 4, 9}, {1, 3, 4, 14}, {3, 1, 9, 9}},
      {{5, 5}, {0, 2, 0, 10}, {0, 2, 0, 10}},
      // A prompt's last single token is no block of four speculative ones.
      {{4, 4, 1, 30}, {2, 2, 8, 31}, {3, 1, 9, 30}},
      {{4, 4, 0, 0}, {4, 0, 8, 0}, {4, 0, 8, 0}},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(split_of(c.lens, uniform), c.uniform) << ::testing::PrintToString(c.lens);
    EXPECT_EQ(split_of(c.lens, varlen), c.varlen) << ::testing::PrintToString(c.lens);
  }
}

TEST(Split, SingleOnlyRefusesAThresholdAboveOne) {  // F052
  for (const QueryLenSupport support : {QueryLenSupport::uniform, QueryLenSupport::varlen}) {
    EXPECT_NO_THROW(split_of({1}, policy_of(support, 8)));
  }
  expect_error(ErrorCode::invalid_argument, {"reorder_batch_threshold is 2", "single_only"},
               [] { split_of({1}, policy_of(QueryLenSupport::single_only, 2)); });
  expect_error(ErrorCode::invalid_argument, {"reorder_batch_threshold is 0"},
               [] { split_of({1}, policy_of(QueryLenSupport::varlen, 0)); });
}

TEST(Split, ShortExtendsArePrefillsUnderPrefillContextParallelism) {
  SplitPolicy policy = policy_of(QueryLenSupport::varlen, 4);
  policy.treat_short_extends_as_decodes = false;
  EXPECT_EQ(split_of({1, 2, 2, 9}, policy, {0, 0, 1, 1}), (BatchSplit{2, 2, 3, 11}));
  policy.treat_short_extends_as_decodes = true;
  EXPECT_EQ(split_of({1, 2, 2, 9}, policy, {0, 0, 1, 1}), (BatchSplit{3, 1, 5, 9}));
}

TEST(Split, TrailingPaddingIsADecodeOnlyWithoutPrefills) {
  EXPECT_EQ(split_of({1, 1, 0, 0}, {}), (BatchSplit{4, 0, 2, 0}));
  EXPECT_EQ(split_of({1, 8, 0, 0}, {}), (BatchSplit{1, 3, 1, 8}));
  EXPECT_EQ(split_of({0, 0}, {}), (BatchSplit{2, 0, 0, 0}));
  EXPECT_EQ(split_of({8, 0}, {}), (BatchSplit{0, 2, 0, 8}));
}

TEST(Split, UnorderedBatchIsRefused) {  // F050
  expect_error(ErrorCode::invalid_argument, {"query_start_loc", "request 2", "request 1"}, [] {
    split_of({1, 7, 1}, {});
  });
}

TEST(Split, ReorderedBatchesAreOrderedAndCountsAddUp) {  // F054
  Random random(54);
  for (int round = 0; round < 5000; ++round) {
    const SplitPolicy policy = policy_of(
        random.pick({QueryLenSupport::uniform, QueryLenSupport::varlen}), random.between(1, 6));
    Lens lens;
    for (int i = random.between(0, 12); i > 0; --i) lens.push_back(random.between(0, 10));
    for (const auto& [a, b] : reorder_swaps(lens, policy)) {
      std::swap(lens[std::size_t(a)], lens[std::size_t(b)]);
    }
    const Lens offsets = offsets_of(lens);
    const BatchSplit split = split_decodes_and_prefills(offsets, policy);
    EXPECT_EQ(split.num_decodes + split.num_prefills, static_cast<std::int32_t>(lens.size()));
    EXPECT_EQ(split.num_decode_tokens + split.num_prefill_tokens, offsets.back());
    EXPECT_EQ(split.num_decode_tokens, offsets[std::size_t(split.num_decodes)]);
    for (std::size_t i = 0; i < std::size_t(split.num_decodes); ++i) {
      EXPECT_LE(lens[i], policy.reorder_batch_threshold);
    }
  }
}

TEST(Split, OffsetsThatAreNoneAreRefused) {
  const auto split = [](const Lens& offsets) { split_decodes_and_prefills(offsets, {}); };
  expect_error(ErrorCode::invalid_argument, {"query_start_loc is empty"}, [&] { split({}); });
  expect_error(ErrorCode::invalid_argument, {"query_start_loc[0] is 1"}, [&] { split({1, 2}); });
  expect_error(ErrorCode::invalid_argument, {"query_start_loc[2] is 1", "3"}, [&] {
    split({0, 3, 1});
  });
}

TEST(UniformBlocks, OneLengthThenPadding) {  // F192, F224, F225
  EXPECT_EQ(split_uniform_blocks(offsets_of({4, 4, 0})), (BatchSplit{3, 0, 8, 0}));
  EXPECT_EQ(split_uniform_blocks(offsets_of({4})), (BatchSplit{1, 0, 4, 0}));
  EXPECT_EQ(split_uniform_blocks(offsets_of({1, 1})), (BatchSplit{2, 0, 2, 0}));
  const Lens refused[] = {{4, 0, 4}, {4, 3}, {0, 0}, {0, 4}, {}};
  for (const Lens& lens : refused) {
    expect_error(ErrorCode::invalid_argument, {"query_start_loc", "non-causal"},
                 [&] { split_uniform_blocks(offsets_of(lens)); });
  }
  expect_error(ErrorCode::invalid_argument, {"[4, 0, 4]"}, [] {
    split_uniform_blocks(offsets_of({4, 0, 4}));
  });
}

// Not "requests <= tokens * threshold", which a batch of long prompts passes.
TEST(DecodeCapture, EveryRequestHasOneToThresholdTokens) {  // F191, F350
  const SplitPolicy policy = policy_of(QueryLenSupport::varlen, 3);
  EXPECT_NO_THROW(check_decode_capture(offsets_of({1, 3, 2}), policy));
  expect_error(ErrorCode::invalid_argument, {"request 1 has 4", "1 to 3"}, [&] {
    check_decode_capture(offsets_of({1, 4}), policy);
  });
  expect_error(ErrorCode::invalid_argument, {"request 0 has 0"}, [&] {
    check_decode_capture(offsets_of({0, 3}), policy);
  });
}

}  // namespace
}  // namespace fovea::testing
