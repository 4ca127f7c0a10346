// Where the rows of a request of a schedule stand.
#pragma once

#include <cstddef>

#include "fovea/plan.h"
#include "variants/visibility.h"

namespace fovea {

inline SequenceExtent extent_of(const PrefillSchedule& schedule, std::int32_t request) {
  const auto r = static_cast<std::size_t>(request);
  SequenceExtent extent{
      .num_queries = schedule.cu_seqlens_q[r + 1] - schedule.cu_seqlens_q[r],
      .num_keys = schedule.cu_seqlens_k[r + 1] - schedule.cu_seqlens_k[r],
  };
  if (!schedule.first_query.empty()) {
    extent.first_query = schedule.first_query[r];
    extent.first_key = schedule.first_key[r];
  }
  return extent;
}

inline SequenceExtent extent_of(const DecodeSchedule& schedule, std::int32_t request) {
  const auto r = static_cast<std::size_t>(request);
  const std::int32_t first = schedule.query_start_loc[r];
  SequenceExtent extent{
      .num_queries = schedule.query_start_loc[r + 1] - first,
      .num_keys = schedule.seq_lens[r],
  };
  if (!schedule.draft_tree.empty()) extent.tree = schedule.draft_tree.data() + first;
  return extent;
}

}  // namespace fovea
