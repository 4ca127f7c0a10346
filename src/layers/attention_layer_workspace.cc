// What an AttentionLayer takes of the workspace, and what it prepares of a plan.
#include <algorithm>

#include "layers/attention_layer_state.h"
#include "layers/step.h"
#include "layers/worst_case.h"

namespace fovea {

AttentionDecodeParams AttentionLayer::State::decode_shapes(const DecodeSchedule& schedule,
                                                           const AttentionVariant& variant,
                                                           const PagedKv& kv) const {
  const std::int64_t N = dims.num_heads, rows = schedule.query_start_loc.back();
  // Queries are part of the fused rows: what declines by strides must see them.
  const TensorView qkv = shape_only(dtype, {rows, dims.qkv_size()});
  return {.q = qkv.slice(1, 0, dims.q_size()).split(1, N, dims.head_dim),
          .kv = kv,
          .out = shape_only(dtype, {rows, N, dims.v_head_dim}),
          .lse = {},
          .schedule = &schedule,
          .variant = variant,
          .sm_scale = dims.sm_scale,
          .sinks = sinks_view()};
}

std::int64_t AttentionLayer::State::decode_bytes(const OpContext& ctx,
                                                 const DecodeSchedule& schedule,
                                                 const AttentionVariant& variant) const {
  const PagedKvCache k = format_only({dtype, dims.k_size()}),
                     v = format_only({dtype, dims.v_size()});
  const PagedKv kv{
      .k_cache = &k, .v_cache = &v, .block_table = {}, .num_kv_heads = dims.num_kv_heads};
  return fovea::workspace_bytes(ctx, decode_shapes(schedule, variant, kv));
}

std::int64_t AttentionLayer::State::prefill_bytes(const OpContext& ctx,
                                                  const PrefillSchedule& schedule) const {
  const std::int64_t N = dims.num_heads, rows = schedule.cu_seqlens_q.back();
  const PagedKvCache k = format_only({dtype, dims.k_size()}),
                     v = format_only({dtype, dims.v_size()});
  return fovea::workspace_bytes(
      ctx, AttentionPrefillParams{.q = shape_only(dtype, {rows, N, dims.head_dim}),
                                  .k = {},
                                  .k_pe = {},
                                  .v = {},
                                  .out = shape_only(dtype, {rows, N, dims.v_head_dim}),
                                  .lse = {},
                                  .schedule = &schedule,
                                  .variant = {},
                                  .sm_scale = dims.sm_scale,
                                  .paged = {.k_cache = &k,
                                            .v_cache = &v,
                                            .block_table = {},
                                            .num_kv_heads = dims.num_kv_heads},
                                  .sinks = sinks_view()});
}

std::int64_t AttentionLayer::State::workspace_bytes(std::int64_t tokens,
                                                    std::int64_t attention_bytes) const {
  return rounded_bytes(dtype, tokens * dims.qkv_size()) +
         rounded_bytes(dtype, tokens * dims.out_size()) +
         std::max({qkv_proj.workspace_bytes(tokens), qkv_lora.workspace_bytes(tokens),
                   attention_bytes, o_proj.workspace_bytes(tokens),
                   o_lora.workspace_bytes(tokens)});
}

void AttentionLayer::prepare(const OpContext& ctx, const AttentionStep& step,
                             const GqaCache& cache) const {
  if (step.plan->split.num_decodes == 0) return;
  const PagedKv kv{.k_cache = &cache.k,
                   .v_cache = &cache.v,
                   .block_table = step.block_table,
                   .num_kv_heads = state_->dims.num_kv_heads};
  AttentionDecodeParams params = state_->decode_shapes(step.plan->decode, step.plan->variant, kv);
  params.prepared = step.prepared;
  fovea::prepare(ctx, params);
}

std::int64_t AttentionLayer::prepared_bytes(const OpContext& ctx, const BatchPlan& plan) const {
  return plan.split.num_decodes > 0 ? state_->decode_bytes(ctx, plan.decode, plan.variant) : 0;
}

std::int64_t AttentionLayer::workspace_bytes(const OpContext& ctx, const BatchPlan& plan) const {
  const std::int64_t decodes = plan.split.num_decode_tokens;
  std::int64_t attention = decodes > 0 ? state_->decode_bytes(ctx, plan.decode, plan.variant) : 0;
  if (plan.num_actual_tokens > decodes) {
    attention = std::max(attention, state_->prefill_bytes(ctx, plan.prefill));
  }
  return state_->workspace_bytes(plan.num_actual_tokens, attention);
}

std::int64_t AttentionLayer::workspace_bytes(const OpContext& ctx,
                                             const AttentionLimits& limits) const {
  if (limits.max_tokens == 0) return 0;
  const DecodeSchedule decode = worst_decode_schedule(limits, ctx.plan_target);
  const PrefillSchedule prefill = worst_prefill_schedule(limits, limits.max_seq_len,
                                                         ctx.pool->num_threads(), ctx.plan_target);
  return state_->workspace_bytes(limits.max_tokens, std::max(state_->decode_bytes(ctx, decode, {}),
                                                             state_->prefill_bytes(ctx, prefill)));
}

}  // namespace fovea
