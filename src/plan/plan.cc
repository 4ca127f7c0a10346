// Everything about one step.
#include "fovea/plan.h"

#include <algorithm>

#include "core/check.h"
#include "plan/lengths.h"

namespace fovea {
namespace {

void check_batch(const SequenceBatch& batch) {
  check_offsets("query_start_loc", batch.query_start_loc);
  check_lengths("seq_lens", batch.seq_lens);
  FOVEA_CHECK(batch.query_start_loc.size() == batch.seq_lens.size() + 1, invalid_argument,
              "query_start_loc has {} entries, must have {}: one more than seq_lens",
              batch.query_start_loc.size(), batch.seq_lens.size() + 1);
  FOVEA_CHECK(batch.is_prefilling.empty() || batch.is_prefilling.size() == batch.seq_lens.size(),
              invalid_argument, "is_prefilling has {} entries, must have {}, one per request, or 0",
              batch.is_prefilling.size(), batch.seq_lens.size());
  for (std::size_t i = 0; i < batch.seq_lens.size(); ++i) {
    const std::int32_t query_len = batch.query_start_loc[i + 1] - batch.query_start_loc[i];
    FOVEA_CHECK(batch.seq_lens[i] >= query_len, invalid_argument,
                "seq_lens[{}] is {}, must be at least {}, the request's query tokens", i,
                batch.seq_lens[i], query_len);
  }
}

BatchSplit split_batch(const SequenceBatch& batch, const PlanTarget& target,
                       const PlanOptions& options) {
  if (options.variant.causal) {
    return split_decodes_and_prefills(batch.query_start_loc, options.split, batch.is_prefilling);
  }
  FOVEA_CHECK(target.non_causal_decode, unsupported,
              "variant.causal is false, must be true: the decode kernel takes causal queries only");
  return split_uniform_blocks(batch.query_start_loc);
}

/// The prefills of a batch as a context plan sees them: counted from the first.
ContextPlanInput context_input(const SequenceBatch& batch, const BatchSplit& split,
                               const PlanTarget& target, const PlanOptions& options) {
  ContextPlanInput input;
  input.kind = options.context_plan;
  input.workspace_rows = options.workspace_rows;
  input.block_size = options.block_size;
  input.align_chunk_to_block = options.align_chunk_to_block;
  input.query_tile = target.prefill_query_tile;
  input.token_to_seq = target.token_to_seq;
  input.parallel = options.parallel;
  const auto first = static_cast<std::size_t>(split.num_decodes);
  input.context_lens.reserve(static_cast<std::size_t>(split.num_prefills));
  input.query_start_loc.reserve(static_cast<std::size_t>(split.num_prefills) + 1);
  input.query_start_loc.push_back(0);
  for (std::size_t i = first; i < batch.seq_lens.size(); ++i) {
    const std::int32_t query_len = batch.query_start_loc[i + 1] - batch.query_start_loc[i];
    input.context_lens.push_back(query_len == 0 ? 0 : batch.seq_lens[i] - query_len);
    input.query_start_loc.push_back(batch.query_start_loc[i + 1] - split.num_decode_tokens);
  }
  return input;
}

/// Query token ranges of the prefills without context.
std::vector<IndexRange> find_empty_token_slices(const ContextPlanInput& input) {
  std::vector<IndexRange> slices;
  for (std::size_t i = 0; i < input.context_lens.size(); ++i) {
    const IndexRange tokens{input.query_start_loc[i], input.query_start_loc[i + 1]};
    if (input.context_lens[i] == 0 && tokens.size() > 0) slices.push_back(tokens);
  }
  return slices;
}

void find_extent(const SequenceBatch& batch, BatchPlan& plan) {
  for (std::size_t i = 0; i < batch.seq_lens.size(); ++i) {
    const std::int32_t query_len = batch.query_start_loc[i + 1] - batch.query_start_loc[i];
    plan.max_query_len = std::max(plan.max_query_len, query_len);
    if (query_len > 0) plan.max_seq_len = std::max(plan.max_seq_len, batch.seq_lens[i]);
  }
}

}  // namespace

BatchPlan make_plan(const SequenceBatch& batch, const PlanTarget& target,
                    const PlanOptions& options) {
  check_batch(batch);
  BatchPlan plan;
  plan.split = split_batch(batch, target, options);
  plan.variant = options.variant;
  plan.num_actual_tokens = batch.query_start_loc.back();
  find_extent(batch, plan);

  const auto num_decodes = static_cast<std::size_t>(plan.split.num_decodes);
  plan.decode = schedule_decode(std::span(batch.query_start_loc).first(num_decodes + 1),
                                std::span(batch.seq_lens).first(num_decodes), target);

  ContextPlanInput context = context_input(batch, plan.split, target, options);
  plan.prefill = schedule_prefill(context.query_start_loc, context.query_start_loc,
                                  context.query_tile, options.variant);
  plan.chunks = plan_context_chunks(context);
  for (const ContextChunk& chunk : plan.chunks) {
    plan.peak_context_rows = std::max(plan.peak_context_rows, chunk.num_context_tokens);
  }
  if (plan.has_context()) plan.empty_token_slices = find_empty_token_slices(context);
  plan.context_lens = std::move(context.context_lens);
  return plan;
}

}  // namespace fovea
