// Everything about one step.
#include "fovea/plan.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "plan/context_spans.h"
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
  FOVEA_CHECK(
      batch.draft_tree.empty() || std::ssize(batch.draft_tree) == batch.query_start_loc.back(),
      invalid_argument, "draft_tree has {} entries, must have {}, one per query token, or 0",
      batch.draft_tree.size(), batch.query_start_loc.back());
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
  input.variant = options.variant;
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

/// The prefills' attention: of the new tokens among themselves, or over whole sequences.
PrefillSchedule schedule_new_tokens(const BatchPlan& plan, const ContextPlanInput& context) {
  if (!plan.paged_context) {
    // Keys start where queries do: behind the context.
    return schedule_prefill(context.query_start_loc, context.query_start_loc, context.query_tile,
                            plan.variant, {context.context_lens, context.context_lens});
  }
  std::vector<std::int32_t> cu_seqlens_k{0};
  std::int64_t keys = 0;
  for (std::size_t i = 0; i < context.context_lens.size(); ++i) {
    const std::int32_t query_len = context.query_start_loc[i + 1] - context.query_start_loc[i];
    keys += std::int64_t{context.context_lens[i]} + query_len;
    FOVEA_CHECK(keys <= std::numeric_limits<std::int32_t>::max(), invalid_argument,
                "seq_lens of the prefills add up to {} at request {}, must stay below 2^31", keys,
                plan.split.num_decodes + static_cast<std::int64_t>(i));
    cu_seqlens_k.push_back(static_cast<std::int32_t>(keys));
  }
  return schedule_prefill(context.query_start_loc, cu_seqlens_k, context.query_tile, plan.variant);
}

/// Query token ranges of the prefills that see no context.
std::vector<IndexRange> find_empty_token_slices(const ContextPlanInput& input) {
  std::vector<IndexRange> slices;
  for (std::size_t i = 0; i < input.context_lens.size(); ++i) {
    const IndexRange tokens{input.query_start_loc[i], input.query_start_loc[i + 1]};
    if (!sees_context(input, i) && tokens.size() > 0) slices.push_back(tokens);
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
  check_variant(options.variant);
  BatchPlan plan;
  plan.split = split_batch(batch, target, options);
  plan.variant = options.variant;
  plan.num_actual_tokens = batch.query_start_loc.back();
  find_extent(batch, plan);

  plan.paged_context = options.context_plan == ContextPlanKind::paged;
  const auto num_decodes = static_cast<std::size_t>(plan.split.num_decodes);
  const auto num_drafts =
      static_cast<std::size_t>(batch.draft_tree.empty() ? 0 : plan.split.num_decode_tokens);
  plan.decode = schedule_decode(std::span(batch.query_start_loc).first(num_decodes + 1),
                                std::span(batch.seq_lens).first(num_decodes), target,
                                options.variant, std::span(batch.draft_tree).first(num_drafts));

  ContextPlanInput context = context_input(batch, plan.split, target, options);
  plan.prefill = schedule_new_tokens(plan, context);
  plan.chunks = plan_context_chunks(context);
  for (const ContextChunk& chunk : plan.chunks) {
    plan.peak_context_rows = std::max(plan.peak_context_rows, chunk.num_context_tokens);
  }
  if (plan.has_context()) plan.empty_token_slices = find_empty_token_slices(context);
  plan.context_lens = std::move(context.context_lens);
  return plan;
}

}  // namespace fovea
