// Which keys a query row sees: first as an interval, then key by key.
//
// Keys are numbered from the start of the sequence. The query rows of a sequence stand at its end:
// row i of n has position num_keys - n + i, which is negative for rows that have no key at all.
// Everything here is constexpr, so that host and device code share it.
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

/// How many query rows and keys a sequence has: what aligns one with the other.
struct SequenceExtent {
  std::int64_t num_queries = 0;
  std::int64_t num_keys = 0;
};

/// Position of query row `query` among the keys; negative when the sequence has too few.
constexpr std::int64_t query_position(std::int64_t query, const SequenceExtent& extent) {
  return extent.num_keys - extent.num_queries + query;
}

/// The smallest interval with every key that query row `query` sees. Both ends never decrease from
/// a row to the next; classify_tile and visible_to_any rely on it.
constexpr KeyInterval visible_keys(const AttentionVariant& variant, std::int64_t query,
                                   const SequenceExtent& extent) {
  if (!variant.causal) return {0, extent.num_keys};
  return {0, std::clamp<std::int64_t>(query_position(query, extent) + 1, 0, extent.num_keys)};
}
constexpr KeyInterval visible_keys(const AttentionVariant& variant, std::int64_t query,
                                   std::int64_t num_queries, std::int64_t num_keys) {
  return visible_keys(variant, query, SequenceExtent{num_queries, num_keys});
}

/// The element rule: whether query row `query` sees key `key`, 0 <= key < num_keys. Needed on
/// border tiles only.
constexpr bool sees(const AttentionVariant& variant, std::int64_t query, std::int64_t key,
                    const SequenceExtent& extent) {
  return !variant.causal || key <= query_position(query, extent);
}

/// Query rows [begin, end) of a sequence.
struct QueryInterval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// The smallest interval with every key that at least one of `queries` (not empty) sees: where a
/// kernel's loop over key tiles starts and ends.
constexpr KeyInterval visible_to_any(const AttentionVariant& variant, const QueryInterval& queries,
                                     const SequenceExtent& extent) {
  return {visible_keys(variant, queries.begin, extent).begin,
          visible_keys(variant, queries.end - 1, extent).end};
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
  const KeyInterval first = visible_keys(variant, queries.begin, extent);
  const KeyInterval last = visible_keys(variant, queries.end - 1, extent);
  if (keys.begin >= last.end || keys.end <= first.begin) return TileVisibility::skipped;
  if (keys.begin >= last.begin && keys.end <= first.end) return TileVisibility::full;
  return TileVisibility::border;
}

}  // namespace fovea
