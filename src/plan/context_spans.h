// Rows that context spans fill in the workspace.
#pragma once

#include <cstddef>
#include <numeric>

#include "fovea/plan.h"
#include "variants/visibility.h"

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

/// Splits fall on multiples of it: on whole blocks, and under context parallelism on whole turns,
/// so that every rank's share starts at a whole turn too.
inline std::int64_t split_alignment(const ContextPlanInput& input) {
  const std::int64_t alignment = input.align_chunk_to_block ? input.block_size : 1;
  if (!input.parallel) return alignment;
  return std::lcm(alignment, std::int64_t{input.parallel->ranks} * input.parallel->interleave);
}

/// Where the gathering of a request's context starts: at the split before the first key that its
/// first query sees; at the context's length when it sees none.
inline std::int64_t context_begin(const ContextPlanInput& input, std::size_t request) {
  const std::int64_t context_len = input.context_lens[request];
  const std::int64_t first = first_visible_position(input.variant, context_len);
  if (first <= 0) return 0;
  const std::int64_t alignment = split_alignment(input);
  return first >= context_len ? context_len : first / alignment * alignment;
}
inline bool sees_context(const ContextPlanInput& input, std::size_t request) {
  return context_begin(input, request) < input.context_lens[request];
}

}  // namespace fovea
