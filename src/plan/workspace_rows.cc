// How many context rows a workspace has.
#include <algorithm>
#include <limits>
#include <numeric>

#include "core/check.h"
#include "fovea/plan.h"
#include "plan/lengths.h"

namespace fovea {
namespace {

// Capacities up to 2^20 (a million) leave every product below 2^62.
constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 20;
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();

}  // namespace

std::int64_t workspace_rows(const WorkspaceRowsInput& input) {
  check_range("max_model_len", input.max_model_len, 1, kMaxRows);
  check_range("max_num_seqs", input.max_num_seqs, 1, kMaxCapacity);
  check_range("block_size", input.block_size, 1, kMaxCapacity);
  check_range("cap", input.cap, 1, kMaxRows);
  check_range("context_ranks", input.context_ranks, 1, kMaxCapacity);
  check_range("interleave", input.interleave, 1, kMaxCapacity / input.context_ranks);

  std::int64_t rows = std::min(
      std::max(8 * input.max_model_len, 4 * input.max_num_seqs * input.block_size), input.cap);
  const std::int64_t alignment =
      input.context_ranks == 1 ? input.block_size
                               : std::lcm(input.block_size, input.context_ranks * input.interleave);
  const std::int64_t least =
      input.one_alignment_per_sequence ? input.max_num_seqs * alignment : alignment;
  if (input.align) {
    rows = std::max(rows, least);
    rows = (rows + alignment - 1) / alignment * alignment;
  }
  FOVEA_CHECK(rows >= least, invalid_argument,
              "cap: {} workspace rows remain, must be at least {} for max_num_seqs {} and chunks "
              "aligned to {} rows",
              rows, least, input.max_num_seqs, alignment);
  FOVEA_CHECK(rows <= kMaxRows, invalid_argument,
              "max_num_seqs is {}: the workspace would need {} rows, must be at most {}",
              input.max_num_seqs, rows, kMaxRows);
  return rows;
}

std::int64_t allocated_workspace_rows(std::int64_t workspace_rows, std::int64_t context_ranks) {
  check_range("workspace_rows", workspace_rows, 0, kMaxRows);
  check_range("context_ranks", context_ranks, 1, kMaxCapacity);
  FOVEA_CHECK(workspace_rows % context_ranks == 0, invalid_argument,
              "workspace_rows is {}, must be a multiple of context_ranks, {}", workspace_rows,
              context_ranks);
  return context_ranks == 1 ? workspace_rows : workspace_rows + workspace_rows / context_ranks;
}

}  // namespace fovea
