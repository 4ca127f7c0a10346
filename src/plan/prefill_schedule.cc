// Cuts a ragged attention call into tiles of query rows.
#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "fovea/plan.h"
#include "plan/extents.h"
#include "plan/lengths.h"
#include "variants/visibility.h"

namespace fovea {
namespace {

struct WeighedTile {
  PrefillTile tile;
  std::int64_t work;  ///< Query rows times keys that the kernel loops over.
};

bool runs_before(const WeighedTile& a, const WeighedTile& b) {
  if (a.work != b.work) return a.work > b.work;
  if (a.tile.request != b.tile.request) return a.tile.request < b.tile.request;
  return a.tile.query_begin < b.tile.query_begin;
}

void append_tiles(std::vector<WeighedTile>& tiles, std::int32_t request,
                  const SequenceExtent& extent, std::int64_t query_tile,
                  const AttentionVariant& variant) {
  for (std::int64_t begin = 0; begin < extent.num_queries; begin += query_tile) {
    const std::int64_t end = std::min(begin + query_tile, extent.num_queries);
    const KeyInterval keys = visible_to_any(variant, {begin, end}, extent);
    tiles.push_back({{request, static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)},
                     (end - begin) * keys.size()});
  }
}

}  // namespace

PrefillSchedule schedule_prefill(std::span<const std::int32_t> cu_seqlens_q,
                                 std::span<const std::int32_t> cu_seqlens_k,
                                 std::int64_t query_tile, const AttentionVariant& variant,
                                 PrefillPositions positions) {
  check_offsets("cu_seqlens_q", cu_seqlens_q);
  check_offsets("cu_seqlens_k", cu_seqlens_k);
  FOVEA_CHECK(cu_seqlens_k.size() == cu_seqlens_q.size(), invalid_argument,
              "cu_seqlens_k has {} entries, must have {}, as many as cu_seqlens_q",
              cu_seqlens_k.size(), cu_seqlens_q.size());
  check_range("query_tile", query_tile, 1, std::numeric_limits<std::int32_t>::max());
  check_variant(variant);
  const std::size_t requests = cu_seqlens_q.size() - 1;
  FOVEA_CHECK(positions.first_query.size() == positions.first_key.size() &&
                  (positions.first_query.empty() || positions.first_query.size() == requests),
              invalid_argument,
              "positions have {} first queries and {} first keys, must have one of each of {} "
              "requests or none",
              positions.first_query.size(), positions.first_key.size(), requests);

  PrefillSchedule schedule;
  schedule.first_query = std::move(positions.first_query);
  schedule.first_key = std::move(positions.first_key);
  schedule.cu_seqlens_q.assign(cu_seqlens_q.begin(), cu_seqlens_q.end());
  schedule.cu_seqlens_k.assign(cu_seqlens_k.begin(), cu_seqlens_k.end());
  std::vector<WeighedTile> tiles;
  for (std::size_t i = 0; i + 1 < cu_seqlens_q.size(); ++i) {
    const std::int32_t query_len = cu_seqlens_q[i + 1] - cu_seqlens_q[i];
    const std::int32_t seq_len = cu_seqlens_k[i + 1] - cu_seqlens_k[i];
    schedule.max_query_len = std::max(schedule.max_query_len, query_len);
    schedule.max_seq_len = std::max(schedule.max_seq_len, seq_len);
    const auto request = static_cast<std::int32_t>(i);
    append_tiles(tiles, request, extent_of(schedule, request), query_tile, variant);
  }
  std::sort(tiles.begin(), tiles.end(), runs_before);
  schedule.tiles.reserve(tiles.size());
  for (const WeighedTile& weighed : tiles) schedule.tiles.push_back(weighed.tile);
  return schedule;
}

}  // namespace fovea
