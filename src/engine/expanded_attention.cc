#include "engine/expanded_attention.h"

#include <algorithm>

#include "core/check.h"

namespace fovea::engine {
namespace {

constexpr AttentionVariant kSeesAllKeys{.causal = false};  // The new token stands at the end.

/// Rows [0, n) dealt to the threads.
template <class F>
void for_row_ranges(ThreadPool& pool, std::int64_t n, F&& fn) {
  const std::int64_t tasks = std::min<std::int64_t>(pool.num_threads(), n);
  pool.run(tasks, [&](std::int64_t task) { fn(n * task / tasks, n * (task + 1) / tasks); });
}

}  // namespace

ExpandedAttention::ExpandedAttention(const OpContext& ctx, const Model& model, std::int64_t layer,
                                     std::int64_t num_keys)
    : ctx_(ctx),
      weights_(model.mla_weights(layer)),
      dims_(std::get<MlaLayer>(model.layer(layer).attention).dims()),
      eps_(model.config().latent_norm_eps),
      rotary_(model.config().groups[0].rope),
      q_b_proj_(weights_.q_b_proj, {}),
      kv_a_proj_(weights_.kv_a_proj, weights_.kv_a_bias),
      kv_b_proj_(weights_.kv_b_proj, {}),
      o_proj_(weights_.o_proj, weights_.o_bias),
      num_keys_(num_keys),
      new_position_(num_keys - 1) {
  FOVEA_CHECK(weights_.kv_b_order == KvBOrder::per_head, unsupported,
              "the comparison reads kv_b_proj head by head");
  const std::int64_t N = dims_.num_heads, P = dims_.qk_nope_head_dim, V = dims_.v_head_dim;
  const DType dtype = model.dtype();
  if (dims_.q_lora_rank > 0) {
    q_a_proj_ = Linear(weights_.q_a_proj, weights_.q_a_bias);
    q_a_ = Tensor::empty(dtype, {1, dims_.q_lora_rank});
  }
  q_ = Tensor::empty(dtype, {1, N, dims_.qk_head_dim()});
  new_row_ = Tensor::empty(dtype, {1, dims_.latent_dim()});
  new_kv_ = Tensor::empty(dtype, {1, N, P + V});
  // Zeros, so that no step pays for the first touch of its memory.
  expanded_ = Tensor::zeros(dtype, {num_keys, N, P + V});
  keys_ = Tensor::zeros(dtype, {N, num_keys, dims_.qk_head_dim()});
  values_ = Tensor::zeros(dtype, {N, num_keys, V});
  attended_ = Tensor::empty(dtype, {1, N, V});

  // The op deals heads to threads; parts of the keys are dealt as well, as requests of their own
  // with the same query.
  const std::int64_t parts = std::min<std::int64_t>(ctx.pool->num_threads(), num_keys);
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;
  for (std::int64_t part = 0; part <= parts; ++part) {
    cu_seqlens_q.push_back(static_cast<std::int32_t>(part));
    cu_seqlens_k.push_back(static_cast<std::int32_t>(num_keys * part / parts));
  }
  schedule_ = schedule_prefill(cu_seqlens_q, cu_seqlens_k, 1, kSeesAllKeys);
  partial_ = Tensor::empty(DType::f32, {parts, N, V});
  lse_ = Tensor::empty(DType::f32, {N, parts});
}

AttentionPrefillParams ExpandedAttention::attention_params() const {
  AttentionPrefillParams params;
  params.q = q_.view().slice(0, 0, 1);
  params.q.shape[0] = partial_.view().shape[0];
  params.q.strides[0] = 0;  // Every part has the same query.
  params.k = keys();
  params.v = values();
  params.out = partial_;
  params.lse = lse_;
  params.schedule = &schedule_;
  params.variant = kSeesAllKeys;
  params.sm_scale = dims_.sm_scale;
  return params;
}

std::int64_t ExpandedAttention::workspace_bytes() const {
  std::int64_t bytes =
      std::max({q_b_proj_.workspace_bytes(1), kv_b_proj_.workspace_bytes(num_keys_),
                kv_a_proj_.workspace_bytes(num_keys_), o_proj_.workspace_bytes(1),
                fovea::workspace_bytes(ctx_, attention_params())});
  if (q_a_proj_) bytes = std::max(bytes, q_a_proj_.workspace_bytes(1));
  return bytes;
}

void ExpandedAttention::latent_rows(const TensorView& normed, const TensorView& positions,
                                    const TensorView& rows) const {
  kv_a_proj_(ctx_, normed, rows);
  const TensorView kv_c = rows.slice(1, 0, dims_.kv_lora_rank);
  rms_norm(ctx_, {.x = kv_c, .weight = weights_.kv_a_layernorm, .out = kv_c, .eps = eps_});
  if (positions) rotate_keys(rows, positions);
}

void ExpandedAttention::rotate_keys(const TensorView& rows, const TensorView& positions) const {
  const TensorView k_pe = rows.slice(1, dims_.kv_lora_rank, dims_.latent_dim());
  rotary_(ctx_, k_pe.split(1, 1, dims_.qk_rope_head_dim), positions);
}

/// q_ and new_row_ of the new token.
void ExpandedAttention::project(const TensorView& normed) {
  const TensorView positions = TensorView::of(&new_position_, {1});
  latent_rows(normed, positions, new_row_);
  TensorView q_input = normed;
  if (q_a_proj_) {
    q_a_proj_(ctx_, normed, q_a_);
    q_input = q_a_;
    rms_norm(ctx_, {.x = q_input, .weight = weights_.q_a_layernorm, .out = q_input, .eps = eps_});
  }
  q_b_proj_(ctx_, q_input, q_.view().fuse(1));
  rotary_(ctx_, q_.view().slice(2, dims_.qk_nope_head_dim, dims_.qk_head_dim()), positions);
}

void ExpandedAttention::attend(const TensorView& k, const TensorView& k_pe, const TensorView& v,
                               const TensorView& out) {
  AttentionPrefillParams params = attention_params();
  params.k = k;
  params.k_pe = k_pe;
  params.v = v;
  attention_prefill(ctx_, params);
  const auto part = [&](std::int64_t i) {
    return AttentionState{partial_.view().slice(0, i, i + 1), lse_.view().slice(1, i, i + 1)};
  };
  for (std::int64_t i = 1; i < partial_.view().shape[0]; ++i) {
    merge_state(ctx_, {.prefix = part(0), .suffix = part(i), .result = part(0), .sinks = {}});
  }
  copy(part(0).out, attended_);
  o_proj_(ctx_, attended_.view().fuse(1), out);
}

void ExpandedAttention::step_with_expanded_cache(const TensorView& normed, const TensorView& out) {
  project(normed);
  const std::int64_t L = dims_.kv_lora_rank, P = dims_.qk_nope_head_dim;
  kv_b_proj_(ctx_, new_row_.view().slice(1, 0, L), new_kv_.view().fuse(1));
  const TensorView key = keys().slice(0, new_position_, num_keys_);
  copy(new_kv_.view().slice(2, 0, P), key.slice(2, 0, P));
  for (std::int64_t n = 0; n < dims_.num_heads; ++n) {
    copy(new_row_.view().slice(1, L, dims_.latent_dim()),
         key.select(1, n).slice(1, P, dims_.qk_head_dim()));
  }
  copy(new_kv_.view().slice(2, P, P + dims_.v_head_dim),
       values().slice(0, new_position_, num_keys_));
  attend(keys(), {}, values(), out);
}

void ExpandedAttention::step_expanding(const TensorView& normed, const TensorView& rows,
                                       const TensorView& out) {
  project(normed);
  const std::int64_t L = dims_.kv_lora_rank, P = dims_.qk_nope_head_dim;
  copy(new_row_, rows.slice(0, new_position_, num_keys_));
  kv_b_proj_(ctx_, rows.slice(1, 0, L), expanded_.view().fuse(1));
  attend(expanded_.view().slice(2, 0, P), rows.slice(1, L, dims_.latent_dim()),
         expanded_.view().slice(2, P, P + dims_.v_head_dim), out);
}

void ExpandedAttention::keep_expanded(const TensorView& rows) {
  const std::int64_t L = dims_.kv_lora_rank, P = dims_.qk_nope_head_dim;
  for_row_ranges(*ctx_.pool, num_keys_, [&](std::int64_t begin, std::int64_t end) {
    const TensorView expanded = expanded_.view().slice(0, begin, end);
    const TensorView key = keys().slice(0, begin, end);
    copy(expanded.slice(2, 0, P), key.slice(2, 0, P));
    copy(expanded.slice(2, P, P + dims_.v_head_dim), values().slice(0, begin, end));
    for (std::int64_t n = 0; n < dims_.num_heads; ++n) {  // All heads share one rope key.
      copy(rows.slice(0, begin, end).slice(1, L, dims_.latent_dim()),
           key.select(1, n).slice(1, P, dims_.qk_head_dim()));
    }
  });
}

}  // namespace fovea::engine
