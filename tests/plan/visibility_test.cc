#include "variants/visibility.h"

#include <gtest/gtest.h>

namespace fovea {
namespace {

constexpr AttentionVariant kCausal{.causal = true};
constexpr AttentionVariant kFull{.causal = false};

static_assert(visible_keys(kCausal, 0, 1, 100) == KeyInterval{0, 100});

TEST(Visibility, CausalRowsEndAtTheirOwnKey) {
  EXPECT_EQ(visible_keys(kCausal, 0, 3, 10), (KeyInterval{0, 8}));
  EXPECT_EQ(visible_keys(kCausal, 2, 3, 10), (KeyInterval{0, 10}));
}

TEST(Visibility, FirstOfMoreQueriesThanKeysSeeNothing) {
  EXPECT_TRUE(visible_keys(kCausal, 0, 5, 3).empty());
  EXPECT_TRUE(visible_keys(kCausal, 1, 5, 3).empty());
  EXPECT_EQ(visible_keys(kCausal, 2, 5, 3), (KeyInterval{0, 1}));
  EXPECT_TRUE(visible_keys(kCausal, 0, 1, 0).empty());
}

TEST(Visibility, NonCausalRowsSeeLaterRowsOfTheirBlock) {
  for (int query = 0; query < 4; ++query) {
    EXPECT_EQ(visible_keys(kFull, query, 4, 9), (KeyInterval{0, 9}));
  }
}

TEST(Visibility, IntersectionIsEmptyInsideTheSecondInterval) {
  EXPECT_EQ(intersect({0, 10}, {4, 20}), (KeyInterval{4, 10}));
  EXPECT_EQ(intersect({0, 3}, {4, 20}), (KeyInterval{4, 4}));
  EXPECT_EQ(intersect({30, 40}, {4, 20}), (KeyInterval{20, 20}));
}

/// Number of (query, key) pairs of a tile that the formula lets through.
std::int64_t count_visible(bool causal, const QueryInterval& queries, const KeyInterval& keys,
                           const SequenceExtent& extent) {
  std::int64_t count = 0;
  for (std::int64_t q = queries.begin; q < queries.end; ++q) {
    for (std::int64_t k = keys.begin; k < keys.end; ++k) {
      count += (!causal || k <= extent.num_keys - extent.num_queries + q) ? 1 : 0;
    }
  }
  return count;
}

// Every tile of every small sequence, against counting pairs.
TEST(Visibility, IntervalsElementsAndTilesAgree) {
  for (const AttentionVariant& variant : {kCausal, kFull}) {
    for (std::int64_t n = 1; n <= 5; ++n) {
      for (std::int64_t m = 1; m <= 7; ++m) {
        const SequenceExtent extent{n, m};
        for (std::int64_t q = 0; q < n; ++q) {
          const KeyInterval visible = visible_keys(variant, q, extent);
          for (std::int64_t k = 0; k < m; ++k) {
            const bool expected = count_visible(variant.causal, {q, q + 1}, {k, k + 1}, extent) > 0;
            EXPECT_EQ(sees(variant, q, k, extent), expected);
            EXPECT_EQ(k >= visible.begin && k < visible.end, expected);
          }
          for (std::int64_t q_end = q + 1; q_end <= n; ++q_end) {
            for (std::int64_t k = 0; k < m; ++k) {
              for (std::int64_t k_end = k + 1; k_end <= m; ++k_end) {
                const QueryInterval queries{q, q_end};
                const KeyInterval keys{k, k_end};
                const std::int64_t count = count_visible(variant.causal, queries, keys, extent);
                const TileVisibility expected = count == 0 ? TileVisibility::skipped
                                                : count == (q_end - q) * keys.size()
                                                    ? TileVisibility::full
                                                    : TileVisibility::border;
                EXPECT_EQ(classify_tile(variant, queries, keys, extent), expected)
                    << "queries " << q << " to " << q_end << " of " << n << ", keys " << k << " to "
                    << k_end << " of " << m;
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea
