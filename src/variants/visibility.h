// Which keys a query row sees: first as an interval, then tile by tile and key by key.
//
// Rows and keys are numbered from the first of a call; what decides is their absolute positions in
// the sequence, which a SequenceExtent adds. Everything here is constexpr, so that host and device
// code share it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fovea/attention_variant.h"

namespace fovea {

/// Keys [begin, end).
struct KeyInterval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  constexpr std::int64_t size() const { return end - begin; }
  constexpr bool empty() const { return begin >= end; }
  constexpr bool operator==(const KeyInterval&) const = default;
};

/// The part of `a` that lies in `b`; [b.begin, b.begin) or [b.end, b.end) when there is none.
constexpr KeyInterval intersect(const KeyInterval& a, const KeyInterval& b) {
  const std::int64_t begin = std::clamp(a.begin, b.begin, b.end);
  return {begin, std::clamp(a.end, begin, b.end)};
}

/// The query rows and keys of a sequence, and where they stand. By default keys start at position 0
/// and queries end with the last key; the first query's position is negative when there are too
/// few.
struct SequenceExtent {
  std::int64_t num_queries = 0;
  std::int64_t num_keys = 0;
  std::int64_t first_query = num_keys - num_queries;  ///< Position of query row 0.
  std::int64_t first_key = 0;                         ///< Position of key 0.
  /// Optional [num_queries], at most 64: the query rows are a draft tree, and their keys the last
  /// num_queries keys. Bit j of tree[i]: row i sees the key of row j; its own and its ancestors',
  /// all of which come before it. It stands at first_query + the number of its ancestors.
  const std::uint64_t* tree = nullptr;
};

constexpr std::int64_t depth_in_tree(const SequenceExtent& extent, std::int64_t query) {
  // Not std::popcount: nvcc 13 makes it 0 on the device.
  return __builtin_popcountll(extent.tree[query]) - 1;
}

constexpr std::int64_t query_position(std::int64_t query, const SequenceExtent& extent) {
  return extent.first_query + (extent.tree ? depth_in_tree(extent, query) : query);
}

/// The first position that a query at `position` may see; may be negative.
constexpr std::int64_t first_visible_position(const AttentionVariant& variant,
                                              std::int64_t position) {
  std::int64_t first = 0;
  if (variant.window_left >= 0) first = position - variant.window_left;
  if (variant.attention_chunk > 0) {
    first = std::max(first, position / variant.attention_chunk * variant.attention_chunk);
  }
  return first;
}

/// Bit j: query row `query` of a draft tree sees the key of row j.
constexpr std::uint64_t visible_drafts(const AttentionVariant& variant, std::int64_t query,
                                       const SequenceExtent& extent) {
  const std::uint64_t related = extent.tree[query];
  const std::int64_t first = first_visible_position(variant, query_position(query, extent));
  if (first <= extent.first_query) return related;
  std::uint64_t visible = 0;
  for (std::int64_t draft = 0; draft <= query; ++draft) {
    const std::uint64_t bit = std::uint64_t{1} << draft;
    if ((related & bit) != 0 && query_position(draft, extent) >= first) visible |= bit;
  }
  return visible;
}

/// The smallest interval with every key that query row `query` sees (under a draft tree, one with
/// every key). Without a tree it holds no other key, and both ends never decrease from a row to the
/// next.
constexpr KeyInterval visible_keys(const AttentionVariant& variant, std::int64_t query,
                                   const SequenceExtent& extent) {
  const std::int64_t position = query_position(query, extent);
  const std::int64_t first = first_visible_position(variant, position) - extent.first_key;
  const std::int64_t num_keys = extent.num_keys;
  if (extent.tree) {
    const std::int64_t context = num_keys - extent.num_queries;
    return {std::clamp<std::int64_t>(first, 0, std::max<std::int64_t>(context, 0)),
            context + query + 1};
  }
  if (!variant.causal) return {std::clamp<std::int64_t>(first, 0, num_keys), num_keys};
  const std::int64_t end = std::clamp<std::int64_t>(position + 1 - extent.first_key, 0, num_keys);
  return {std::clamp<std::int64_t>(first, 0, end), end};
}
constexpr KeyInterval visible_keys(const AttentionVariant& variant, std::int64_t query,
                                   std::int64_t num_queries, std::int64_t num_keys) {
  return visible_keys(variant, query, SequenceExtent{num_queries, num_keys});
}

/// The element rule: whether query row `query` sees key `key`, 0 <= key < num_keys. Needed on
/// border tiles only.
constexpr bool sees(const AttentionVariant& variant, std::int64_t query, std::int64_t key,
                    const SequenceExtent& extent) {
  const std::int64_t position = query_position(query, extent);
  const std::int64_t first = first_visible_position(variant, position);
  const std::int64_t draft = key - (extent.num_keys - extent.num_queries);
  if (extent.tree && draft >= 0) {
    const bool is_ancestor = (extent.tree[query] >> draft & 1) != 0;
    return is_ancestor && query_position(draft, extent) >= first;
  }
  const std::int64_t key_position = extent.first_key + key;
  return key_position >= first && (!variant.causal || key_position <= position);
}

/// Query rows [begin, end) of a sequence.
struct QueryInterval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// The smallest interval with the visible_keys of all `queries` (not empty): where a kernel's loop
/// over key tiles starts and ends.
constexpr KeyInterval visible_to_any(const AttentionVariant& variant, const QueryInterval& queries,
                                     const SequenceExtent& extent) {
  KeyInterval all{visible_keys(variant, queries.begin, extent).begin,
                  visible_keys(variant, queries.end - 1, extent).end};
  for (std::int64_t q = queries.begin; extent.tree && q < queries.end; ++q) {
    const KeyInterval visible = visible_keys(variant, q, extent);
    all = {std::min(all.begin, visible.begin), std::max(all.end, visible.end)};
  }
  return all;
}

/// The largest interval of keys that each of `queries` (not empty) sees in full.
constexpr KeyInterval visible_to_all(const AttentionVariant& variant, const QueryInterval& queries,
                                     const SequenceExtent& extent) {
  KeyInterval all{visible_keys(variant, queries.end - 1, extent).begin,
                  visible_keys(variant, queries.begin, extent).end};
  if (!extent.tree) return all;
  // Which drafts a row sees is for the element rule.
  all = {0, extent.num_keys - extent.num_queries};
  for (std::int64_t q = queries.begin; q < queries.end; ++q) {
    all.begin = std::max(all.begin, visible_keys(variant, q, extent).begin);
  }
  return all;
}

enum class TileVisibility : std::uint8_t {
  skipped,  ///< No query sees any key: not computed.
  full,     ///< Every query sees every key: no mask.
  border,   ///< The element rule decides.
};

/// `queries` and `keys` are not empty.
constexpr TileVisibility classify_tile(const AttentionVariant& variant,
                                       const QueryInterval& queries, const KeyInterval& keys,
                                       const SequenceExtent& extent) {
  const KeyInterval any = visible_to_any(variant, queries, extent);
  if (keys.begin >= any.end || keys.end <= any.begin) return TileVisibility::skipped;
  const KeyInterval all = visible_to_all(variant, queries, extent);
  if (keys.begin >= all.begin && keys.end <= all.end) return TileVisibility::full;
  return TileVisibility::border;
}

/// Bit i: key i of a tile, whose key `first_draft` is bit 0 of `drafts`, is one of these or comes
/// before all of them. -64 < first_draft < 64: some key of the tile is a draft of the tree.
constexpr std::uint64_t drafts_of_tile(std::uint64_t drafts, std::int32_t first_draft) {
  const std::int32_t context = std::max(first_draft, 0);
  return drafts << context >> std::max(-first_draft, 0) | ((std::uint64_t{1} << context) - 1);
}

/// Bit i: query row `query` sees key keys.begin + i. At most 64 keys.
constexpr std::uint64_t visible_bits(const AttentionVariant& variant, std::int64_t query,
                                     const KeyInterval& keys, const SequenceExtent& extent) {
  const KeyInterval seen = intersect(visible_keys(variant, query, extent), keys);
  if (seen.empty()) return 0;
  const auto first = static_cast<int>(seen.begin - keys.begin);
  const auto count = static_cast<int>(seen.size());
  const std::uint64_t bits = ~std::uint64_t{0} >> (64 - count) << first;
  const std::int64_t context = extent.num_keys - extent.num_queries;
  if (extent.tree == nullptr || context >= keys.end) return bits;
  return bits & drafts_of_tile(visible_drafts(variant, query, extent),
                               static_cast<std::int32_t>(context - keys.begin));
}

}  // namespace fovea
