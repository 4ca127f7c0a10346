#include "ops/decode_schedule.h"

#include "core/check.h"
#include "plan/extents.h"

namespace fovea {
namespace {

KeyInterval visible_to_request(const AttentionVariant& variant, const SequenceExtent& extent) {
  return visible_to_any(variant, {0, extent.num_queries}, extent);
}

/// The items of each request follow each other and have every key that its queries see.
void check_items(const char* op, const DecodeSchedule& schedule, const AttentionVariant& variant) {
  std::size_t next = 0;
  for (std::size_t r = 0; r < schedule.seq_lens.size(); ++r) {
    const auto request = static_cast<std::int32_t>(r);
    const SequenceExtent extent = extent_of(schedule, request);
    if (extent.num_queries == 0) continue;
    const std::int32_t first_partial = schedule.partial_begin[r];
    const std::int32_t partials = schedule.partial_begin[r + 1] - first_partial;
    std::int64_t begin = visible_to_request(variant, extent).begin;
    for (std::int32_t i = 0; i < std::max(partials, 1); ++i, ++next) {
      FOVEA_CHECK(next < schedule.items.size(), invalid_argument,
                  "{}: schedule has {} items; it must have {} for request {} behind them", op,
                  schedule.items.size(), std::max(partials, 1) - i, r);
      const WorkItem& item = schedule.items[next];
      const std::int32_t partial = partials == 0 ? -1 : first_partial + i;
      const bool starts = i == 0 ? item.kv_begin >= 0 && item.kv_begin <= begin
                                 : item.kv_begin == static_cast<std::int32_t>(begin);
      const bool ends =
          i + 1 < partials ? item.kv_end <= extent.num_keys : item.kv_end == extent.num_keys;
      FOVEA_CHECK(
          item.request == request && item.partial == partial && starts && ends &&
              item.kv_begin <= item.kv_end,
          invalid_argument,
          "{}: schedule item {} has keys [{}, {}) of request {} and partial {}; it must "
          "have keys of request {} {} key {} on, up to {} of {}, and partial {} (plan again "
          "for another variant)",
          op, next, item.kv_begin, item.kv_end, item.request, item.partial, request,
          i == 0 ? "at the latest from" : "from", begin, i + 1 < partials ? "at most all" : "all",
          extent.num_keys, partial);
      begin = item.kv_end;
    }
  }
  FOVEA_CHECK(next == schedule.items.size(), invalid_argument,
              "{}: schedule has {} items; it must have {}", op, schedule.items.size(), next);
}

void check_requests(const char* op, const DecodeSchedule& schedule) {
  for (std::size_t r = 0; r < schedule.seq_lens.size(); ++r) {
    FOVEA_CHECK(schedule.seq_lens[r] >= 0, invalid_argument,
                "{}: schedule->seq_lens[{}] is {}; it must not be negative", op, r,
                schedule.seq_lens[r]);
    const std::int32_t query_len = schedule.query_start_loc[r + 1] - schedule.query_start_loc[r];
    FOVEA_CHECK(query_len <= schedule.max_query_len, invalid_argument,
                "{}: schedule request {} has {} query tokens; max_query_len = {} must cover them",
                op, r, query_len, schedule.max_query_len);
    FOVEA_CHECK(
        schedule.draft_tree.empty() || (query_len <= 64 && query_len <= schedule.seq_lens[r]),
        invalid_argument,
        "{}: schedule request {} has {} query tokens in a draft tree and {} keys; it must "
        "have at most 64, and no more than keys",
        op, r, query_len, schedule.seq_lens[r]);
  }
}

}  // namespace

void check_decode_schedule(const char* op, const DecodeSchedule* schedule,
                           const AttentionVariant& variant, const Argument& rows_name,
                           std::int64_t rows) {
  FOVEA_CHECK(schedule != nullptr, invalid_argument,
              "{}: schedule is null; it must come from schedule_decode ({}_once plans for you)", op,
              op);
  check_variant(op, variant);
  const DecodeSchedule& s = *schedule;
  check_offsets({op, "schedule->query_start_loc"}, s.query_start_loc, rows, rows_name.name);
  FOVEA_CHECK(s.query_start_loc.size() == s.seq_lens.size() + 1, invalid_argument,
              "{}: schedule->query_start_loc has {} entries; it must have one more than seq_lens, "
              "{}",
              op, s.query_start_loc.size(), s.seq_lens.size());
  FOVEA_CHECK(
      s.draft_tree.empty() ||
          (variant.causal && std::ssize(s.draft_tree) == s.query_start_loc.back()),
      invalid_argument,
      "{}: schedule->draft_tree has {} entries for {} query tokens of a {} variant; it must "
      "have one for each, with a causal one, or none",
      op, s.draft_tree.size(), s.query_start_loc.back(), variant.causal ? "causal" : "non-causal");
  check_requests(op, s);
  const auto items = static_cast<std::int64_t>(s.items.size());
  check_offsets({op, "schedule->partial_begin"}, s.partial_begin, items, "the number of items");
  FOVEA_CHECK(s.partial_begin.size() == s.seq_lens.size() + 1, invalid_argument,
              "{}: schedule->partial_begin has {} entries; it must have one more than seq_lens, {}",
              op, s.partial_begin.size(), s.seq_lens.size());
  check_offsets({op, "schedule->worker_begin"}, s.worker_begin, items, "the number of items");
  FOVEA_CHECK(s.worker_begin.back() == items, invalid_argument,
              "{}: schedule->worker_begin ends at {}; it must end at the number of items, {}", op,
              s.worker_begin.back(), items);
  check_items(op, s, variant);
}

void check_table_device(const OpContext& ctx, const char* op, const BlockTableView& table) {
  FOVEA_CHECK(table.device == Device{} || table.device == ctx.memory.device, unsupported,
              "{}: block_table is on {}; this context computes on {}", op, to_string(table.device),
              to_string(ctx.memory.device));
}

void check_decode_blocks(const char* op, const DecodeSchedule& schedule,
                         const AttentionVariant& variant, const BlockTableView& table,
                         const PagedKvCache& cache) {
  check_block_table(op, table, std::ssize(schedule.seq_lens), schedule.device_seq_lens != nullptr);
  for (std::size_t r = 0; r < schedule.seq_lens.size(); ++r) {
    const auto request = static_cast<std::int32_t>(r);
    const SequenceExtent extent = extent_of(schedule, request);
    if (extent.num_queries == 0) continue;
    check_block_row(op, table, cache, request, visible_to_request(variant, extent).begin,
                    extent.num_keys);
  }
}

}  // namespace fovea
