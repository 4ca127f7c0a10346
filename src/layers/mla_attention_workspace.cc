// What MlaAttention takes of the workspace, in the order in which mla_attention.cc takes it.
#include <algorithm>

#include "core/check.h"
#include "fovea/mla.h"
#include "layers/step.h"
#include "layers/worst_case.h"

namespace fovea {
std::int64_t MlaAttention::state_bytes(std::int64_t tokens) const {
  return rounded_bytes(DType::f32, tokens * dims_.num_heads * dims_.v_head_dim) +
         rounded_bytes(DType::f32, dims_.num_heads * tokens);
}

std::int64_t MlaAttention::expanded_bytes(std::int64_t keys) const {
  return rounded_bytes(dtype(), keys * kv_b_proj_.out_features());
}

std::int64_t MlaAttention::attention_bytes(const OpContext& ctx, const PrefillSchedule& schedule,
                                           std::int64_t queries, std::int64_t keys) const {
  const std::int64_t N = dims_.num_heads;
  return fovea::workspace_bytes(ctx, {.q = shape_only(dtype(), {queries, N, dims_.qk_head_dim()}),
                                      .k = shape_only(dtype(), {keys, N, dims_.qk_nope_head_dim}),
                                      .k_pe = shape_only(dtype(), {keys, dims_.qk_rope_head_dim}),
                                      .v = shape_only(dtype(), {keys, N, dims_.v_head_dim}),
                                      .out = shape_only(DType::f32, {queries, N, dims_.v_head_dim}),
                                      .lse = shape_only(DType::f32, {N, queries}),
                                      .schedule = &schedule,
                                      .variant = {},
                                      .sm_scale = dims_.sm_scale,
                                      .paged = {},
                                      .sinks = sinks()});
}

std::int64_t MlaAttention::new_tokens_bytes(std::int64_t tokens, std::int64_t attention) const {
  return expanded_bytes(tokens) + std::max(kv_b_proj_.workspace_bytes(tokens), attention);
}

std::int64_t MlaAttention::chunk_bytes(std::int64_t queries, std::int64_t keys, bool merges,
                                       std::int64_t attention) const {
  const std::int64_t partial = merges ? state_bytes(queries) : 0;
  return rounded_bytes(dtype(), keys * dims_.latent_dim()) + expanded_bytes(keys) +
         std::max(kv_b_proj_.workspace_bytes(keys), partial + attention);
}

MlaDecodeParams MlaAttention::decode_shapes(const DecodeSchedule& schedule,
                                            const AttentionVariant& variant,
                                            const PagedKvCache& cache) const {
  const std::int64_t N = dims_.num_heads, L = dims_.kv_lora_rank, R = dims_.qk_rope_head_dim;
  const std::int64_t rows = schedule.query_start_loc.back();
  const DType q_dtype = q_scale_ > 0 ? DType::f8e4m3fn : dtype();
  // In two steps q_pe is part of q's rows: what declines by strides must see them.
  const std::int64_t first = absorb_ ? dims_.qk_nope_head_dim : 0;
  return {.q_latent = shape_only(q_dtype, {rows, N, L}),
          .q_pe = shape_only(q_dtype, {rows, N, first + R}).slice(2, first, first + R),
          .cache = &cache,
          .block_table = {},
          .out = shape_only(dtype(), {rows, N, L}),
          .lse = {},
          .schedule = &schedule,
          .variant = variant,
          .sm_scale = dims_.sm_scale,
          .sinks = sinks(),
          .q_scale = q_scale_};
}

void MlaAttention::prepare(const OpContext& ctx, const AttentionStep& step,
                           const PagedKvCache& cache) const {
  if (step.plan->split.num_decodes == 0) return;
  MlaDecodeParams params = decode_shapes(step.plan->decode, step.plan->variant, cache);
  params.block_table = step.block_table;
  params.prepared = step.prepared;
  fovea::prepare(ctx, params);
}

std::int64_t MlaAttention::prepared_bytes(const OpContext& ctx, const BatchPlan& plan) const {
  if (plan.split.num_decodes == 0) return 0;
  const PagedKvCache cache = format_only({dtype(), dims_.latent_dim()});
  return fovea::workspace_bytes(ctx, decode_shapes(plan.decode, plan.variant, cache));
}

std::int64_t MlaAttention::decode_bytes(const OpContext& ctx, const DecodeSchedule& schedule,
                                        const AttentionVariant& variant,
                                        std::int64_t tokens) const {
  const std::int64_t N = dims_.num_heads, L = dims_.kv_lora_rank;
  const PagedKvCache cache = format_only({dtype(), dims_.latent_dim()});
  const std::int64_t codes =
      q_scale_ > 0 ? rounded_bytes(DType::f8e4m3fn, tokens * N * dims_.latent_dim()) : 0;
  const std::int64_t attention =
      codes + fovea::workspace_bytes(ctx, decode_shapes(schedule, variant, cache));
  if (!absorb_) return attention;
  return 2 * rounded_bytes(dtype(), tokens * N * L) +
         std::max({attention, absorb_.workspace_bytes(tokens),
                   codes + v_up_.workspace_bytes(tokens)});
}

std::int64_t MlaAttention::workspace_bytes(const OpContext& ctx, const BatchPlan& plan) const {
  FOVEA_CHECK(!plan.paged_context, invalid_argument,
              "plan was made with ContextPlanKind::paged, but MLA expands context chunk by chunk: "
              "make it packed or equal");
  const std::int64_t decodes = plan.split.num_decode_tokens;
  const std::int64_t prefills = plan.num_actual_tokens - decodes;
  std::int64_t bytes = decodes > 0 ? decode_bytes(ctx, plan.decode, plan.variant, decodes) : 0;
  if (prefills == 0) return bytes;
  const std::int64_t new_tokens =
      new_tokens_bytes(prefills, attention_bytes(ctx, plan.prefill, prefills, prefills));
  if (!plan.has_context()) return std::max(bytes, new_tokens);
  const std::int64_t context = state_bytes(prefills);
  bytes = std::max(bytes, 2 * context + new_tokens);
  for (const ContextChunk& chunk : plan.chunks) {
    const std::int64_t queries = chunk.tokens.size(), keys = chunk.num_context_tokens;
    const bool merges = chunk.merge_end > chunk.tokens.begin;
    bytes =
        std::max(bytes, context + chunk_bytes(queries, keys, merges,
                                              attention_bytes(ctx, chunk.schedule, queries, keys)));
  }
  return bytes;
}

std::int64_t MlaAttention::workspace_bytes(const OpContext& ctx,
                                           const AttentionLimits& limits) const {
  const std::int64_t tokens = limits.max_tokens, keys = limits.workspace_rows;
  if (tokens == 0) return 0;
  const DecodeSchedule decode = worst_decode_schedule(limits, ctx.plan_target);
  const std::int64_t decodes = std::min(tokens, limits.max_num_seqs * limits.max_decode_query_len);
  const PrefillSchedule prefill = worst_prefill_schedule(limits, std::max(tokens, keys),
                                                         ctx.pool->num_threads(), ctx.plan_target);
  const std::int64_t attention =
      attention_bytes(ctx, prefill, prefill.cu_seqlens_q.back(), prefill.cu_seqlens_k.back());
  const std::int64_t context = keys > 0 ? state_bytes(tokens) : 0;
  return std::max({decode_bytes(ctx, decode, {}, decodes),
                   2 * context + new_tokens_bytes(tokens, attention),
                   context + chunk_bytes(tokens, keys, keys > 0, attention)});
}

}  // namespace fovea
