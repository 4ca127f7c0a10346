// The rules of visibility against counting pairs by the definition of each rule.
#include "variants/visibility.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fovea {
namespace {

static_assert(visible_keys({}, 0, 1, 100) == KeyInterval{0, 100});
static_assert(window_left_of(128) == 127 && window_left_of(1) == 0);
static_assert(window_left_of(0) == -1 && window_left_of(-1) == -1);

/// A sequence's rows as the definitions see them: one position per query and key.
struct Sequence {
  AttentionVariant variant;
  SequenceExtent extent;
  std::vector<int> parents;  ///< Of each query in the draft tree, -1 for a root; empty: no tree.
  std::vector<std::uint64_t> tree;

  std::int64_t ancestors(std::int64_t query) const {
    std::int64_t count = 0;
    for (int p = parents[static_cast<std::size_t>(query)]; p >= 0;
         p = parents[static_cast<std::size_t>(p)]) {
      ++count;
    }
    return count;
  }

  std::int64_t position(std::int64_t query) const {
    return extent.first_query + (parents.empty() ? query : ancestors(query));
  }

  bool sees(std::int64_t query, std::int64_t key) const {
    const std::int64_t context = extent.num_keys - extent.num_queries;
    std::int64_t key_position = extent.first_key + key;
    if (!parents.empty() && key >= context) {
      auto at = static_cast<int>(query);
      while (at >= 0 && at != key - context) at = parents[static_cast<std::size_t>(at)];
      if (at < 0) return false;
      key_position = position(key - context);
    }
    const std::int64_t p = position(query);
    if (variant.causal && key_position > p) return false;
    if (variant.window_left >= 0 && p - key_position > variant.window_left) return false;
    // No key has a negative position, so that with a negative p none is left by now.
    return variant.attention_chunk == 0 ||
           key_position / variant.attention_chunk == p / variant.attention_chunk;
  }

  std::string text() const {
    std::string s =
        std::to_string(extent.num_queries) + " queries from " + std::to_string(extent.first_query) +
        ", " + std::to_string(extent.num_keys) + " keys from " + std::to_string(extent.first_key) +
        (variant.causal ? ", causal" : "") + ", window " + std::to_string(variant.window_left) +
        ", chunk " + std::to_string(variant.attention_chunk);
    for (int parent : parents) s += ", child of " + std::to_string(parent);
    return s;
  }
};

/// Every tile of a sequence. `exact`: intervals are the smallest, and tiles are never border when
/// they could be skipped or full.
void check(const Sequence& s, bool exact) {
  SCOPED_TRACE(s.text());
  const SequenceExtent& extent = s.extent;
  for (std::int64_t q = 0; q < extent.num_queries; ++q) {
    const KeyInterval visible = visible_keys(s.variant, q, extent);
    ASSERT_TRUE(visible.begin >= 0 && visible.begin <= visible.end &&
                visible.end <= extent.num_keys);
    for (std::int64_t k = 0; k < extent.num_keys; ++k) {
      const bool expected = s.sees(q, k), inside = k >= visible.begin && k < visible.end;
      ASSERT_EQ(sees(s.variant, q, k, extent), expected) << "query " << q << ", key " << k;
      ASSERT_TRUE(exact ? inside == expected : inside || !expected)
          << "query " << q << ", key " << k;
    }
    for (std::int64_t q_end = q + 1; q_end <= extent.num_queries; ++q_end) {
      const KeyInterval any = visible_to_any(s.variant, {q, q_end}, extent);
      const KeyInterval all = visible_to_all(s.variant, {q, q_end}, extent);
      for (std::int64_t k = 0; k < extent.num_keys; ++k) {
        std::int64_t seen_by = 0;
        for (std::int64_t i = q; i < q_end; ++i) seen_by += s.sees(i, k) ? 1 : 0;
        const bool in_any = k >= any.begin && k < any.end, in_all = k >= all.begin && k < all.end;
        ASSERT_TRUE(exact ? in_any == (seen_by > 0) : in_any || seen_by == 0) << "key " << k;
        ASSERT_TRUE(exact ? in_all == (seen_by == q_end - q) : !in_all || seen_by == q_end - q)
            << "key " << k;
      }
      for (std::int64_t k = 0; k < extent.num_keys; ++k) {
        std::int64_t pairs = 0;
        for (std::int64_t k_end = k + 1; k_end <= extent.num_keys; ++k_end) {
          for (std::int64_t i = q; i < q_end; ++i) pairs += s.sees(i, k_end - 1) ? 1 : 0;
          const TileVisibility best = pairs == 0                           ? TileVisibility::skipped
                                      : pairs == (q_end - q) * (k_end - k) ? TileVisibility::full
                                                                           : TileVisibility::border;
          const TileVisibility got = classify_tile(s.variant, {q, q_end}, {k, k_end}, extent);
          ASSERT_TRUE(got == best || (!exact && got == TileVisibility::border))
              << "queries " << q << " to " << q_end << ", keys " << k << " to " << k_end << ": "
              << static_cast<int>(got) << " instead of " << static_cast<int>(best);
        }
      }
    }
    for (std::int64_t k = 0; k < extent.num_keys; ++k) {
      std::uint64_t expected = 0;
      for (std::int64_t k_end = k + 1; k_end <= extent.num_keys; ++k_end) {
        expected |= std::uint64_t{s.sees(q, k_end - 1)} << (k_end - 1 - k);
        ASSERT_EQ(visible_bits(s.variant, q, {k, k_end}, extent), expected)
            << "query " << q << ", keys " << k << " to " << k_end;
      }
    }
  }
}

/// `check` for every small sequence of a variant.
void check_all(const AttentionVariant& variant, bool everywhere) {
  for (std::int64_t n = 1; n <= 4; ++n) {
    for (std::int64_t m = 0; m <= 6; ++m) {
      Sequence s{variant, SequenceExtent{n, m}, {}, {}};
      check(s, true);
      if (!everywhere) continue;
      // As a slice of context, or new tokens alone: keys before, around and behind the queries.
      for (std::int64_t first_key : {0, 3, 5}) {
        for (std::int64_t first_query : {0, 2, 5, 8, 20}) {
          s.extent = {n, m, first_query, first_key};
          check(s, true);
        }
      }
    }
  }
}

constexpr std::int64_t kWindows[] = {-1, 0, 1, 2, 4, 100};

TEST(Visibility, IsCausalOrNotInAWindow) {
  for (bool causal : {true, false}) {
    for (std::int64_t window : kWindows) {
      check_all({.causal = causal, .window_left = window}, true);
    }
  }
}

TEST(Visibility, StaysInAChunk) {
  for (std::int64_t chunk : {1, 2, 3, 4, 50}) {
    for (std::int64_t window : kWindows) {
      check_all({.window_left = window, .attention_chunk = chunk}, true);
    }
  }
}

TEST(Visibility, FollowsDraftTrees) {
  for (std::int64_t n = 1; n <= 4; ++n) {
    // Every forest: the parent of row i is any row before it, or none.
    std::int64_t forests = 1;
    for (std::int64_t i = 1; i <= n; ++i) forests *= i;
    for (std::int64_t number = 0; number < forests; ++number) {
      Sequence s;
      for (std::int64_t i = 0, rest = number; i < n; rest /= ++i) {
        const auto parent = static_cast<int>(rest % (i + 1)) - 1;
        s.parents.push_back(parent);
        s.tree.push_back(std::uint64_t{1} << i);
        if (parent >= 0) s.tree.back() |= s.tree[static_cast<std::size_t>(parent)];
      }
      for (std::int64_t context : {0, 1, 5}) {
        s.extent = SequenceExtent{n, context + n};
        s.extent.tree = s.tree.data();
        for (std::int64_t window : kWindows) {
          for (std::int64_t chunk : {0, 1, 3, 4}) {
            s.variant = {.window_left = window, .attention_chunk = chunk};
            check(s, false);
          }
        }
      }
    }
  }
}

TEST(Visibility, TilesOfContextUnderADraftTreeAreSkippedAndFull) {
  // Rows at positions 100, 101, 101: all see the context's last 50 keys but one.
  const std::uint64_t tree[] = {0b001, 0b011, 0b101};
  SequenceExtent extent{3, 103};
  extent.tree = tree;
  const AttentionVariant variant{.window_left = 50};
  EXPECT_EQ(classify_tile(variant, {0, 3}, {0, 50}, extent), TileVisibility::skipped);
  EXPECT_EQ(classify_tile(variant, {0, 3}, {50, 52}, extent), TileVisibility::border);
  EXPECT_EQ(classify_tile(variant, {0, 3}, {51, 100}, extent), TileVisibility::full);
  EXPECT_EQ(classify_tile(variant, {0, 3}, {99, 101}, extent), TileVisibility::border);
}

TEST(Visibility, GoldenMasksOfWindowsAndChunks) {  // F240, F241, F242, F243, B104
  const auto rows_of = [](const AttentionVariant& variant, std::int64_t queries,
                          std::int64_t keys) {
    std::vector<KeyInterval> rows;
    for (std::int64_t q = 0; q < queries; ++q) {
      rows.push_back(visible_keys(variant, q, queries, keys));
    }
    return rows;
  };
  using Rows = std::vector<KeyInterval>;
  EXPECT_EQ(rows_of({.window_left = 1}, 3, 5), (Rows{{1, 3}, {2, 4}, {3, 5}}));
  EXPECT_EQ(rows_of({.causal = false, .window_left = 1}, 3, 5), (Rows{{1, 5}, {2, 5}, {3, 5}}));
  EXPECT_EQ(rows_of({.window_left = 1}, 1, 5), (Rows{{3, 5}}));
  EXPECT_EQ(rows_of({}, 5, 3), (Rows{{0, 0}, {0, 0}, {0, 1}, {0, 2}, {0, 3}}));
  EXPECT_EQ(rows_of({.attention_chunk = 3}, 6, 6),
            (Rows{{0, 1}, {0, 2}, {0, 3}, {3, 4}, {3, 5}, {3, 6}}));
  EXPECT_EQ(rows_of({.attention_chunk = 4}, 1, 5), (Rows{{4, 5}}));
}

TEST(Visibility, BitsReachAllSixtyFourKeys) {
  EXPECT_EQ(visible_bits({}, 0, {10, 74}, SequenceExtent{1, 100}), ~std::uint64_t{0});
  EXPECT_EQ(visible_bits({}, 0, {36, 100}, SequenceExtent{2, 100}), ~std::uint64_t{0} >> 1);
  EXPECT_EQ(visible_bits({.window_left = 0}, 0, {36, 100}, SequenceExtent{1, 100}),
            std::uint64_t{1} << 63);
}

TEST(Visibility, DraftsOfATileReachAllSixtyFourKeys) {
  constexpr std::uint64_t kAll = ~std::uint64_t{0}, kLast = std::uint64_t{1} << 63;
  EXPECT_EQ(drafts_of_tile(kLast | 1, 0), kLast | 1);
  EXPECT_EQ(drafts_of_tile(kLast | 2, 1), 0b101u);
  EXPECT_EQ(drafts_of_tile(0, 63), kAll >> 1);
  EXPECT_EQ(drafts_of_tile(1, 63), kAll);
  EXPECT_EQ(drafts_of_tile(kLast | 1, -63), 1u);
}

TEST(Visibility, BitsOfADraftTreeReachAllSixtyFourKeys) {
  // A chain of 64 whose last token stands 63 behind the first.
  std::vector<std::uint64_t> tree;
  for (int i = 0; i < 64; ++i) tree.push_back(~std::uint64_t{0} >> (63 - i));
  SequenceExtent extent{64, 200};
  extent.tree = tree.data();
  for (const AttentionVariant& variant :
       {AttentionVariant{}, {.window_left = 20}, {.window_left = 70}, {.attention_chunk = 37}}) {
    for (std::int64_t query : {0, 1, 40, 62, 63}) {
      for (std::int64_t begin = 40; begin <= 136; ++begin) {
        std::uint64_t expected = 0;
        for (std::int64_t key = begin; key < begin + 64; ++key) {
          expected |= std::uint64_t{sees(variant, query, key, extent)} << (key - begin);
        }
        ASSERT_EQ(visible_bits(variant, query, {begin, begin + 64}, extent), expected)
            << "window " << variant.window_left << ", query " << query << ", from " << begin;
      }
    }
  }
}

TEST(Visibility, IntersectionIsEmptyInsideTheSecondInterval) {
  EXPECT_EQ(intersect({0, 10}, {4, 20}), (KeyInterval{4, 10}));
  EXPECT_EQ(intersect({0, 3}, {4, 20}), (KeyInterval{4, 4}));
  EXPECT_EQ(intersect({30, 40}, {4, 20}), (KeyInterval{20, 20}));
}

}  // namespace
}  // namespace fovea
