#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "fovea/mla.h"
#include "layers/absorbed_heads.h"
#include "layers/projection.h"
#include "layers/rows.h"
#include "layers/step.h"
#include "ops/checks.h"
#include "ops/dispatch.h"

namespace fovea {

/// The rows after the decodes, up to the plan's tokens: Tp of them.
struct MlaAttention::PrefillRows {
  TensorView q;     ///< [Tp, N, P + R]
  TensorView kv_c;  ///< [Tp, L]
  TensorView k_pe;  ///< [Tp, R]
  TensorView out;   ///< [Tp, N, V]
};

/// Views of kv_b_proj's output.
struct MlaAttention::Expanded {
  TensorView k_nope;  ///< [T, N, P]
  TensorView v;       ///< [T, N, V]
};

namespace {

Projection dense_kv_b(const TensorView& weight) { return {"kv_b_proj", weight, {}}; }

Projection quantized_kv_b(const QuantizedWeight& weight) {
  check_quantized_weight(weight);
  return {"kv_b_proj", weight.codes, {weight.scale, weight.groups}};
}

/// Tokens [begin, end) of a state.
AttentionState slice(const AttentionState& state, std::int64_t begin, std::int64_t end) {
  return {state.out.slice(0, begin, end), state.lse.slice(1, begin, end)};
}

AttentionState take_state(WorkspaceScope& scope, std::int64_t tokens, const MlaDims& dims) {
  return {scope.take(DType::f32, {tokens, dims.num_heads, dims.v_head_dim}),
          scope.take(DType::f32, {dims.num_heads, tokens})};
}

void set_empty(const OpContext& ctx, const AttentionState& state) {
  write_padding_rows(ctx, 0, state.out, state.lse);
}

}  // namespace

MlaAttention::MlaAttention(const MlaDims& dims, const Projection& kv_b_proj, DType dtype,
                           const MlaAttentionOptions& options)
    : dims_(dims.validated()),
      order_(options.order),
      q_scale_(options.q_scale),
      absorbed_products_(options.absorbed_products) {
  FOVEA_CHECK(q_scale_ >= 0 && std::isfinite(q_scale_), invalid_argument,
              "q_scale is {}, but must be positive and finite, or 0 for queries as they are",
              q_scale_);
  if (options.sinks) check_any_dtype("sinks", options.sinks, {dims_.num_heads});
  sinks_ = sinks_in_f32(options.sinks, options.memory);
  mla_up_projections(dims_, kv_b_proj.weight, order_);  // Says what is wrong with the shape.
  kv_b_proj_ = make_linear(kv_b_proj, {}, dtype, options.linear, options.memory);
  const bool is_full = options.absorption == MlaAbsorption::full;
  FOVEA_CHECK(!is_full || absorbed_products_ == AbsorbedProducts::dense, invalid_argument,
              "absorbed_products are not dense, but must be: absorption is full, which has none");
  if (!is_full) make_absorbed(kv_b_proj, dtype, options);
}

void MlaAttention::make_absorbed(const Projection& kv_b_proj, DType dtype,
                                 const MlaAttentionOptions& options) {
  if (absorbed_products_ == AbsorbedProducts::dense) {
    const DenseWeight dense(kv_b_proj, dtype);
    const MlaUpProjections up = mla_up_projections(dims_, dense, order_);
    absorb_ = BatchedLinear(up.w_uk, options.linear, options.memory);
    v_up_ = BatchedLinear(up.w_uv, options.linear, options.memory);
    return;
  }
  const AbsorbedHeads heads(absorbed_products_, dims_, kv_b_proj, order_);
  absorb_ = BatchedLinear(heads.w_uk(), dtype, options.memory);
  v_up_ = BatchedLinear(heads.w_uv(), dtype, options.memory);
}

void MlaAttention::reload_absorbed(const Projection& kv_b_proj) {
  if (absorbed_products_ == AbsorbedProducts::dense) {
    const DenseWeight dense(kv_b_proj, dtype());
    const MlaUpProjections up = mla_up_projections(dims_, dense, order_);
    absorb_.reload(up.w_uk);
    return v_up_.reload(up.w_uv);
  }
  const AbsorbedHeads heads(absorbed_products_, dims_, kv_b_proj, order_);
  absorb_.reload(heads.w_uk());
  v_up_.reload(heads.w_uv());
}

MlaAttention::MlaAttention(const MlaDims& dims, const TensorView& kv_b_proj,
                           const MlaAttentionOptions& options)
    : MlaAttention(dims, dense_kv_b(kv_b_proj), kv_b_proj.dtype, options) {}

MlaAttention::MlaAttention(const MlaDims& dims, const QuantizedWeight& kv_b_proj, DType dtype,
                           const MlaAttentionOptions& options)
    : MlaAttention(dims, quantized_kv_b(kv_b_proj), dtype, options) {}

void MlaAttention::reload(const TensorView& kv_b_proj, KvBOrder order, const TensorView& sinks) {
  reload(dense_kv_b(kv_b_proj), order, sinks);
}

void MlaAttention::reload(const QuantizedWeight& kv_b_proj, KvBOrder order,
                          const TensorView& sinks) {
  reload(quantized_kv_b(kv_b_proj), order, sinks);
}

void MlaAttention::reload(const Projection& kv_b_proj, KvBOrder order, const TensorView& sinks) {
  mla_up_projections(dims_, kv_b_proj.weight, order);
  check_reload(kv_b_proj, kv_b_proj_);
  FOVEA_CHECK(static_cast<bool>(sinks) == static_cast<bool>(sinks_), invalid_argument,
              "sinks are {}, but must be {} as when the layer was made", sinks ? "there" : "absent",
              sinks_ ? "there" : "absent");
  if (sinks) check_any_dtype("sinks", sinks, {dims_.num_heads});
  fovea::reload(kv_b_proj, {}, kv_b_proj_);
  if (sinks) sinks_.assign(sinks);
  order_ = order;
  if (absorb_) reload_absorbed(kv_b_proj);
}

std::int64_t MlaAttention::weight_bytes() const {
  return kv_b_proj_.weight_bytes() + sinks_.nbytes() +
         (absorb_ ? absorb_.weight_bytes() + v_up_.weight_bytes() : 0);
}

MlaAttention::Expanded MlaAttention::split_expanded(const TensorView& kv) const {
  const std::int64_t N = dims_.num_heads, P = dims_.qk_nope_head_dim, V = dims_.v_head_dim;
  if (order_ == KvBOrder::per_head) {
    const TensorView heads = kv.split(1, N, P + V);
    return {heads.slice(2, 0, P), heads.slice(2, P, P + V)};
  }
  return {kv.slice(1, 0, N * P).split(1, N, P), kv.slice(1, N * P, N * (P + V)).split(1, N, V)};
}

// ---------------------------------------------------------------- checks

void MlaAttention::check(const OpContext& ctx, const Operands& o, const AttentionStep& step,
                         const PagedKvCache& cache) const {
  const BatchPlan& plan = *step.plan;
  const std::int64_t N = dims_.num_heads, L = dims_.kv_lora_rank, R = dims_.qk_rope_head_dim;
  const std::int64_t tokens = o.kv_c.ndim == 2 ? o.kv_c.shape[0] : 0;
  const std::int64_t decodes = plan.split.num_decode_tokens;
  const bool absorbed = static_cast<bool>(o.decode_q_latent);
  FOVEA_CHECK(!step.lora_ids, unsupported, "lora_ids is there, but must not be: MLA has no LoRA");
  FOVEA_CHECK(absorbed || absorb_, invalid_argument,
              "decode_q_latent is absent, but must be there: this attention was made for full "
              "absorption");
  FOVEA_CHECK(plan.num_actual_tokens <= tokens, invalid_argument,
              "kv_c is {}, but must have the {} rows of the plan", to_string(o.kv_c),
              plan.num_actual_tokens);
  const std::int64_t rows = tokens - (absorbed ? decodes : 0);
  check_rows("q", o.q, dtype(), {rows, N, dims_.qk_head_dim()});
  check_rows("kv_c", o.kv_c, dtype(), {tokens, L});
  check_shape("k_pe", o.k_pe, dtype(), {tokens, R});
  check_rows("out", o.out, dtype(), {rows, N, dims_.v_head_dim});
  if (absorbed) {
    check_rows("decode_q_latent", o.decode_q_latent, dtype(), {decodes, N, L});
    check_rows("decode_q_pe", o.decode_q_pe, dtype(), {decodes, N, R});
    check_rows("decode_out_latent", o.decode_out_latent, dtype(), {decodes, N, L});
  }
  FOVEA_CHECK(decodes == plan.num_actual_tokens || !(o.kv_norm_weight || o.k_rope.cos_sin),
              invalid_argument,
              "kv_norm_weight or k_rope is there, but must be absent in a step with {} prefill "
              "tokens, which read kv_c and k_pe",
              plan.num_actual_tokens - decodes);
  if (step.slot_mapping) check_indices("slot_mapping", step.slot_mapping, tokens);
  for (const ContextChunk& chunk : plan.chunks) {
    FOVEA_CHECK(!chunk.parallel, unsupported,
                "plan is split over {} context ranks, but this layer attends on one",
                chunk.parallel->local_context_lens_all_ranks.empty()
                    ? 0
                    : chunk.parallel->local_context_lens_all_ranks.front().size());
  }
  check_cache("mla_attention", &cache, dims_.latent_dim(), "L + R");
  check_blocks("mla_attention", plan, step.block_table, cache);
  check_workspace(ctx, workspace_bytes(ctx, plan));
}

// ---------------------------------------------------------------- a step

namespace {

/// Of the first `tokens` tokens.
RopeAngles first_angles(RopeAngles angles, std::int64_t tokens) {
  if (angles.positions) {
    angles.positions = angles.positions.slice(angles.positions.ndim - 1, 0, tokens);
  }
  return angles;
}

}  // namespace

void MlaAttention::operator()(const OpContext& ctx, const Operands& o, const AttentionStep& step,
                              const PagedKvCache& cache) const {
  FOVEA_CHECK(step.plan != nullptr, invalid_argument,
              "step.plan is null, but attention needs one: profile runs end in the layer");
  check(ctx, o, step, cache);
  const BatchPlan& plan = *step.plan;
  const std::int64_t actual = plan.num_actual_tokens;
  const std::int64_t decodes = plan.split.num_decode_tokens;
  if (step.slot_mapping) {
    kv_append(ctx, {.kv_c = o.kv_c.slice(0, 0, actual),
                    .k_pe = o.k_pe.slice(0, 0, actual),
                    .slot_mapping = step.slot_mapping.slice(0, 0, actual),
                    .cache = &cache,
                    .norm_weight = o.kv_norm_weight,
                    .norm_eps = o.kv_norm_eps,
                    .rope = first_angles(o.k_rope, actual)});
  }
  if (decodes > 0) decode(ctx, o, step, cache);
  // Rows of q and out that belong to decodes.
  const std::int64_t skipped = o.decode_q_latent ? 0 : decodes;
  const std::int64_t end = skipped + actual - decodes;
  if (actual > decodes) {
    prefill(ctx,
            {.q = o.q.slice(0, skipped, end),
             .kv_c = o.kv_c.slice(0, decodes, actual),
             .k_pe = o.k_pe.slice(0, decodes, actual),
             .out = o.out.slice(0, skipped, end)},
            step, cache);
  }
  fill_zero(ctx, o.out.slice(0, end, o.out.shape[0]));
}

void MlaAttention::decode(const OpContext& ctx, const Operands& o, const AttentionStep& step,
                          const PagedKvCache& cache) const {
  const std::int64_t N = dims_.num_heads, L = dims_.kv_lora_rank, P = dims_.qk_nope_head_dim;
  const std::int64_t tokens = step.plan->split.num_decode_tokens;
  const bool absorbed = static_cast<bool>(o.decode_q_latent);
  WorkspaceScope scope(*ctx.workspace);
  MlaDecodeParams params{.q_latent = o.decode_q_latent,
                         .q_pe = o.decode_q_pe,
                         .cache = &cache,
                         .block_table = step.block_table,
                         .out = o.decode_out_latent,
                         .lse = {},
                         .schedule = &step.plan->decode,
                         .variant = step.plan->variant,
                         .sm_scale = dims_.sm_scale,
                         .sinks = sinks(),
                         .q_scale = 0.f,
                         .prepared = step.prepared};
  if (!absorbed) {
    const TensorView q = o.q.slice(0, 0, tokens);
    params.q_latent = scope.take(dtype(), {tokens, N, L});
    params.q_pe = q.slice(2, P, dims_.qk_head_dim());
    params.out = scope.take(dtype(), {tokens, N, L});
    absorb_(ctx, q.slice(2, 0, P), params.q_latent);  // [Td, N, P] -> [Td, N, L]
  }
  if (q_scale_ > 0) {
    const TensorView codes = scope.take(DType::f8e4m3fn, {tokens, N, dims_.latent_dim()});
    quantize_query(ctx, {params.q_latent, params.q_pe, codes, q_scale_});
    params.q_latent = codes.slice(2, 0, L);
    params.q_pe = codes.slice(2, L, dims_.latent_dim());
    params.q_scale = q_scale_;
  }
  mla_decode(ctx, params);
  if (!absorbed) v_up_(ctx, params.out, o.out.slice(0, 0, tokens));  // -> [Td, N, V]
}

void MlaAttention::prefill(const OpContext& ctx, const PrefillRows& rows, const AttentionStep& step,
                           const PagedKvCache& cache) const {
  const BatchPlan& plan = *step.plan;
  if (!plan.has_context()) return attend_new_tokens(ctx, rows, plan, {.out = rows.out, .lse = {}});
  const std::int64_t tokens = rows.q.shape[0];
  WorkspaceScope scope(*ctx.workspace);
  const AttentionState context = take_state(scope, tokens, dims_);
  for (const IndexRange& range : plan.empty_token_slices) {
    set_empty(ctx, slice(context, range.begin, range.end));
  }
  for (const ContextChunk& chunk : plan.chunks) {
    attend_chunk(ctx, rows, chunk, step, cache, context);
  }
  const AttentionState new_tokens = take_state(scope, tokens, dims_);
  attend_new_tokens(ctx, rows, plan, new_tokens);
  merge_state(ctx, {.prefix = context,
                    .suffix = new_tokens,
                    .result = {.out = rows.out, .lse = {}},
                    .sinks = sinks()});
}

/// The new tokens among themselves, from their fresh rows: the cache's copy may be quantised. Sinks
/// join here only when no merge follows.
void MlaAttention::attend_new_tokens(const OpContext& ctx, const PrefillRows& rows,
                                     const BatchPlan& plan, const AttentionState& result) const {
  WorkspaceScope scope(*ctx.workspace);
  const TensorView kv = scope.take(dtype(), {rows.kv_c.shape[0], kv_b_proj_.out_features()});
  kv_b_proj_(ctx, rows.kv_c, kv);  // [Tp, L] -> [Tp, N * (P + V)]
  const Expanded expanded = split_expanded(kv);
  attention_prefill(ctx, {.q = rows.q,
                          .k = expanded.k_nope,
                          .k_pe = rows.k_pe,
                          .v = expanded.v,
                          .out = result.out,
                          .lse = result.lse,
                          .schedule = &plan.prefill,
                          .variant = plan.variant,
                          .sm_scale = dims_.sm_scale,
                          .paged = {},
                          .sinks = plan.has_context() ? TensorView{} : sinks()});
}

/// A chunk's context rows, gathered and expanded; joins the chunk's partial with `context`.
void MlaAttention::attend_chunk(const OpContext& ctx, const PrefillRows& rows,
                                const ContextChunk& chunk, const AttentionStep& step,
                                const PagedKvCache& cache, const AttentionState& context) const {
  const std::int64_t L = dims_.kv_lora_rank, keys = chunk.num_context_tokens;
  const std::int64_t begin = chunk.tokens.begin, end = chunk.tokens.end;
  WorkspaceScope scope(*ctx.workspace);
  const TensorView latent = scope.take(dtype(), {keys, dims_.latent_dim()});
  kv_gather(ctx, {.cache = &cache,
                  .block_table = requests_from(step.block_table,
                                               step.plan->split.num_decodes + chunk.requests.begin,
                                               chunk.requests.size()),
                  .starts = chunk.starts,
                  .seq_lens = chunk.seq_lens,
                  .out = latent});
  const TensorView kv = scope.take(dtype(), {keys, kv_b_proj_.out_features()});
  kv_b_proj_(ctx, latent.slice(1, 0, L), kv);  // [keys, L] -> [keys, N * (P + V)]
  const Expanded expanded = split_expanded(kv);

  const AttentionState target = slice(context, begin, end);
  const std::int64_t merged = chunk.merge_end - begin;  // Tokens that have a partial already.
  const AttentionState partial = merged > 0 ? take_state(scope, end - begin, dims_) : target;
  attention_prefill(ctx, {.q = rows.q.slice(0, begin, end),
                          .k = expanded.k_nope,
                          .k_pe = latent.slice(1, L, dims_.latent_dim()),
                          .v = expanded.v,
                          .out = partial.out,
                          .lse = partial.lse,
                          .schedule = &chunk.schedule,
                          .variant = step.plan->variant,
                          .sm_scale = dims_.sm_scale,
                          .paged = {},
                          .sinks = {}});
  if (merged == 0) return;
  // Where there is no partial yet, the merge copies bits.
  set_empty(ctx, slice(target, merged, end - begin));
  merge_state(ctx, {.prefix = target, .suffix = partial, .result = target, .sinks = {}});
}

}  // namespace fovea
