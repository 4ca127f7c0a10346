// Rows that context spans fill in the workspace.
#pragma once

#include "fovea/plan.h"

namespace fovea {

/// Rows of one rank's share of the workspace: what the spans of a chunk may fill.
inline std::int64_t row_budget(const ContextPlanInput& input) {
  return input.parallel ? input.workspace_rows / input.parallel->ranks : input.workspace_rows;
}

/// Rows that context positions [start, start + seq_len) fill on a rank. Under context parallelism
/// the difference of padded lengths, as a rank's rows of later spans follow those of earlier ones.
inline std::int64_t span_rows(const ContextPlanInput& input, std::int64_t start,
                              std::int64_t seq_len) {
  if (!input.parallel) return seq_len;
  return padded_local_length(start + seq_len, *input.parallel) -
         padded_local_length(start, *input.parallel);
}

}  // namespace fovea
