#include "layers/worst_case.h"

#include <algorithm>

namespace fovea {

DecodeSchedule worst_decode_schedule(const AttentionLimits& limits, const PlanTarget& target) {
  // Workers are cut from one line of work: at most workers - 1 cuts, each at worst in a request of
  // its own, which then has two partials. Batch-invariant pieces are every request's own.
  const auto requests = static_cast<std::int32_t>(std::max<std::int64_t>(limits.max_num_seqs, 1));
  const auto keys = static_cast<std::int32_t>(std::max<std::int64_t>(limits.max_seq_len, 1));
  const std::int32_t pieces = (keys - 1) / kInvariantSplitKeys + 1;
  const std::int32_t invariant_partials = pieces > 1 ? requests * pieces : 0;
  const std::int32_t partials = target.batch_invariant ? invariant_partials
                                                       : 2 * std::max(target.num_workers - 1, 0);
  DecodeSchedule schedule;
  schedule.max_query_len =
      static_cast<std::int32_t>(std::max<std::int64_t>(limits.max_decode_query_len, 1));
  schedule.query_start_loc.push_back(0);
  schedule.partial_begin.push_back(0);
  for (std::int32_t r = 0; r < requests; ++r) {
    schedule.query_start_loc.push_back(schedule.query_start_loc.back() + schedule.max_query_len);
    schedule.seq_lens.push_back(keys);
    schedule.partial_begin.push_back(partials);
    // The first request has all partials, the first of which all keys.
    if (r > 0 || partials == 0) {
      schedule.items.push_back({.request = r, .kv_begin = 0, .kv_end = keys, .partial = -1});
      continue;
    }
    for (std::int32_t p = 0; p < partials; ++p) {
      schedule.items.push_back(
          {.request = r, .kv_begin = p == 0 ? 0 : keys, .kv_end = keys, .partial = p});
    }
  }
  schedule.worker_begin.assign(static_cast<std::size_t>(target.num_workers) + 1,
                               static_cast<std::int32_t>(schedule.items.size()));
  schedule.worker_begin.front() = 0;
  return schedule;
}

PrefillSchedule worst_prefill_schedule(const AttentionLimits& limits, std::int64_t max_seq_len,
                                       int num_threads, const PlanTarget& target) {
  const auto rows = static_cast<std::int32_t>(
      std::min<std::int64_t>(limits.max_tokens, target.prefill_query_tile));
  const std::int64_t requests = std::max<std::int64_t>(num_threads, limits.max_num_seqs);
  // The first request has all rows; what the others' last tiles are short of makes one more each.
  std::vector<std::int32_t> cu_seqlens_q = {0, static_cast<std::int32_t>(limits.max_tokens) + rows};
  for (std::int64_t i = 1; i < requests; ++i) cu_seqlens_q.push_back(cu_seqlens_q.back() + rows);
  const std::vector<std::int32_t> cu_seqlens_k(cu_seqlens_q.size(), 0);
  PrefillSchedule schedule =
      schedule_prefill(cu_seqlens_q, cu_seqlens_k, target.prefill_query_tile);
  schedule.max_seq_len = static_cast<std::int32_t>(max_seq_len);
  return schedule;
}

}  // namespace fovea
