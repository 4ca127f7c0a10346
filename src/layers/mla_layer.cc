#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "fovea/mla.h"
#include "layers/absorbed_weights.h"
#include "layers/mla_weights.h"
#include "layers/rows.h"
#include "layers/step.h"
#include "ops/quantized_output.h"

namespace fovea {
namespace {

/// The caller's thread alone.
class SerialPool final : public ThreadPool {
 public:
  int num_threads() const override { return 1; }
  void run(std::int64_t num_tasks, TaskRef fn) override {
    for (std::int64_t task = 0; task < num_tasks; ++task) fn(task);
  }
};

}  // namespace

struct MlaLayer::State {
  /// Rows of a step; decodes first.
  struct StepRows {
    std::int64_t tokens = 0;   ///< Ta, padding excluded.
    std::int64_t decodes = 0;  ///< Td
    std::int64_t prefills() const { return tokens - decodes; }
    bool all_decode() const { return tokens == decodes; }
  };

  State(const MlaDims& dims, const MlaWeights& weights,
        std::shared_ptr<const RotaryEmbedding> rotary, const MlaOptions& options);

  /// What the projections make of the hidden states, and what o_proj reads.
  struct Projected {
    TensorView fused_a;  ///< [Ta, Lq + L + R]
    TensorView q;        ///< [Ta, N, P + R], with full absorption [Ta - Td, N, P + R]
    TensorView out;      ///< The same rows of [.., N, V]
    // Full absorption only.
    TensorView decode_q_latent;    ///< [Td, N, L]
    TensorView decode_q_pe;        ///< [Td, N, R]
    TensorView decode_out_latent;  ///< [Td, N, L]
  };

  bool is_full() const { return static_cast<bool>(w_q_uk); }
  std::int64_t query_rows(const StepRows& rows) const {
    return is_full() ? rows.prefills() : rows.tokens;
  }
  Projected take(WorkspaceScope& scope, const StepRows& rows) const;
  std::int64_t projected_bytes(const StepRows& rows) const;
  std::int64_t products_bytes(const StepRows& rows) const;
  void norm_latents(const OpContext& ctx, const StepRows& rows, const Projected& projected) const;
  void project(const OpContext& ctx, const TensorView& hidden, const StepRows& rows,
               const Projected& projected) const;
  void rotate(const OpContext& ctx, const StepRows& rows, const TensorView& positions,
              const Projected& projected) const;
  void finish(const OpContext& ctx, const StepRows& rows, const Projected& projected,
              const TensorView& out) const;
  /// A checked step up to attention's output, then finish(rows, projected) with what finds it.
  template <class Finish>
  void run(const OpContext& ctx, const TensorView& hidden, const AttentionStep& step,
           const PagedKvCache& cache, Finish&& finish) const;
  TensorView latent_rows(const Projected& projected) const {
    return projected.fused_a.slice(1, dims.q_lora_rank, dims.q_lora_rank + dims.latent_dim());
  }
  std::int64_t workspace_bytes(const StepRows& rows, std::int64_t attention_bytes) const {
    return projected_bytes(rows) + std::max(products_bytes(rows), attention_bytes);
  }

  MlaDims dims;
  MlaOptions options;
  DType dtype;
  std::shared_ptr<const RotaryEmbedding> rotary;
  Linear fused_a;  ///< H -> Lq + L + R
  Tensor q_a_layernorm;
  Tensor kv_a_layernorm;
  Linear q_b_proj;  ///< Lq or H -> N * (P + R)
  MlaAttention attention;
  Linear o_proj;  ///< N * V -> H
  // Full absorption only.
  Linear w_q_uk;  ///< Lq or H -> N * L
  Linear w_qr;    ///< Lq or H -> N * R
  Linear w_uv_o;  ///< N * L -> H
};

MlaLayer::State::State(const MlaDims& dims_, const MlaWeights& w,
                       std::shared_ptr<const RotaryEmbedding> rotary_, const MlaOptions& options_)
    : dims(dims_.validated()),
      options(options_),
      dtype(weights_dtype(w, options)),
      rotary(std::move(rotary_)) {
  check_weights(dims, w, dtype, options);
  FOVEA_CHECK(options.rms_norm_eps >= 0 && std::isfinite(options.rms_norm_eps), invalid_argument,
              "rms_norm_eps is {}, but must be finite and not negative", options.rms_norm_eps);
  FOVEA_CHECK(!rotary || rotary->config().dim == dims.qk_rope_head_dim, invalid_argument,
              "rotary turns {} channels, but must turn qk_rope_head_dim = {}",
              rotary ? rotary->config().dim : 0, dims.qk_rope_head_dim);
  const MlaProjections p(w);
  const FusedA a(dims, w, dtype);
  fused_a = make_linear(a.weight.projection, a.bias, dtype, options.linear, options.memory);
  if (dims.q_lora_rank > 0) {
    q_a_layernorm = Tensor::copy_of(w.q_a_layernorm, options.memory);
  }
  kv_a_layernorm = Tensor::copy_of(w.kv_a_layernorm, options.memory);
  q_b_proj = make_linear(p.q_b, {}, dtype, options.linear, options.memory);
  const MlaAttentionOptions attention_options{.order = w.kv_b_order,
                                              .linear = options.linear,
                                              .absorption = options.absorption,
                                              .sinks = w.sinks,
                                              .q_scale = options.q_scale,
                                              .absorbed_products = options.absorbed_products,
                                              .memory = options.memory};
  attention = p.kv_b.is_quantized()
                  ? MlaAttention(dims, p.kv_b.quantized(), dtype, attention_options)
                  : MlaAttention(dims, w.kv_b_proj, attention_options);
  o_proj = make_linear(p.o, w.o_bias, dtype, options.linear, options.memory);
  if (options.absorption == MlaAbsorption::two_step) return;
  const AbsorbedWeights absorbed = absorb(dims, w, dtype, options.requantize_absorbed);
  w_q_uk = make_linear(absorbed.w_q_uk.projection, {}, dtype, options.linear, options.memory);
  w_qr = make_linear(absorbed.w_qr.projection, {}, dtype, options.linear, options.memory);
  w_uv_o = make_linear(absorbed.w_uv_o.projection, w.o_bias, dtype, options.linear, options.memory);
}

MlaLayer::State::Projected MlaLayer::State::take(WorkspaceScope& scope,
                                                 const StepRows& rows) const {
  const std::int64_t N = dims.num_heads, L = dims.kv_lora_rank;
  const std::int64_t query_rows_ = query_rows(rows);
  Projected p;
  p.fused_a = scope.take(dtype, {rows.tokens, fused_a.out_features()});
  p.q = scope.take(dtype, {query_rows_, N, dims.qk_head_dim()});
  p.out = scope.take(dtype, {query_rows_, N, dims.v_head_dim});
  if (!is_full()) return p;
  p.decode_q_latent = scope.take(dtype, {rows.decodes, N, L});
  p.decode_q_pe = scope.take(dtype, {rows.decodes, N, dims.qk_rope_head_dim});
  p.decode_out_latent = scope.take(dtype, {rows.decodes, N, L});
  return p;
}

std::int64_t MlaLayer::State::projected_bytes(const StepRows& rows) const {
  const std::int64_t N = dims.num_heads, L = dims.kv_lora_rank, R = dims.qk_rope_head_dim;
  const std::int64_t query_rows_ = query_rows(rows);
  std::int64_t bytes = rounded_bytes(dtype, rows.tokens * fused_a.out_features()) +
                       rounded_bytes(dtype, query_rows_ * N * dims.qk_head_dim()) +
                       rounded_bytes(dtype, query_rows_ * N * dims.v_head_dim);
  if (is_full()) {
    bytes +=
        2 * rounded_bytes(dtype, rows.decodes * N * L) + rounded_bytes(dtype, rows.decodes * N * R);
  }
  return bytes;
}

/// The most that one of the products takes.
std::int64_t MlaLayer::State::products_bytes(const StepRows& rows) const {
  std::int64_t bytes =
      std::max({fused_a.workspace_bytes(rows.tokens), q_b_proj.workspace_bytes(query_rows(rows)),
                o_proj.workspace_bytes(query_rows(rows))});
  if (is_full()) {
    bytes = std::max({bytes, w_q_uk.workspace_bytes(rows.decodes),
                      w_qr.workspace_bytes(rows.decodes), w_uv_o.workspace_bytes(rows.decodes)});
  }
  return bytes;
}

/// q_a_layernorm and kv_a_layernorm, side by side in one parallel region where there is work for
/// it: a row's bits depend on the row alone. Where all rows are decodes the second is done on the
/// way into the cache.
void MlaLayer::State::norm_latents(const OpContext& ctx, const StepRows& rows,
                                   const Projected& p) const {
  const TensorView q_a = p.fused_a.slice(1, 0, dims.q_lora_rank);
  const TensorView kv_c = latent_rows(p).slice(1, 0, dims.kv_lora_rank);
  const RmsNormParams q{.x = q_a, .weight = q_a_layernorm, .out = q_a, .eps = options.rms_norm_eps};
  const RmsNormParams kv{
      .x = kv_c, .weight = kv_a_layernorm, .out = kv_c, .eps = options.rms_norm_eps};
  if (rows.all_decode()) {
    if (dims.q_lora_rank > 0) rms_norm(ctx, q);
    return;
  }
  const std::int64_t tokens = kv_c.shape[0], threads = ctx.pool->num_threads();
  // Some microseconds: what waking another thread costs.
  constexpr std::int64_t kMinElements = 16 * 1024;
  const bool side_by_side = ctx.memory.device == Device{} && threads > 1 &&
                            dims.q_lora_rank > 0 &&
                            tokens * (dims.q_lora_rank + dims.kv_lora_rank) >= kMinElements;
  if (!side_by_side) {
    if (dims.q_lora_rank > 0) rms_norm(ctx, q);
    return rms_norm(ctx, kv);
  }
  const std::int64_t parts = std::min(tokens, threads);
  ctx.pool->run(2 * parts, [&](std::int64_t task) {
    SerialPool serial;
    OpContext alone = ctx;
    alone.pool = &serial;
    RmsNormParams part = task % 2 == 0 ? q : kv;
    const std::int64_t i = task / 2;
    part.x = part.out = part.x.slice(0, tokens * i / parts, tokens * (i + 1) / parts);
    rms_norm(alone, part);
  });
}

void MlaLayer::State::project(const OpContext& ctx, const TensorView& hidden, const StepRows& rows,
                              const Projected& p) const {
  fused_a(ctx, hidden, p.fused_a);  // [Ta, H] -> [Ta, Lq + L + R]
  norm_latents(ctx, rows, p);
  const TensorView q_input =
      dims.q_lora_rank > 0 ? p.fused_a.slice(1, 0, dims.q_lora_rank) : hidden;
  if (!is_full()) return q_b_proj(ctx, q_input, p.q.fuse(1));
  const TensorView decode_input = q_input.slice(0, 0, rows.decodes);
  w_q_uk(ctx, decode_input, p.decode_q_latent.fuse(1));
  w_qr(ctx, decode_input, p.decode_q_pe.fuse(1));
  q_b_proj(ctx, q_input.slice(0, rows.decodes, rows.tokens), p.q.fuse(1));
}

void MlaLayer::State::rotate(const OpContext& ctx, const StepRows& rows,
                             const TensorView& positions, const Projected& p) const {
  const auto turn = [&](const TensorView& x, std::int64_t begin, std::int64_t end) {
    (*rotary)(ctx, x, positions.slice(positions.ndim - 1, begin, end));
  };
  if (!rows.all_decode()) {  // Decodes' keys turn on the way into the cache.
    const TensorView k_pe = latent_rows(p).slice(1, dims.kv_lora_rank, dims.latent_dim());
    turn(k_pe.split(1, 1, dims.qk_rope_head_dim), 0, rows.tokens);
  }
  const TensorView q_pe = p.q.slice(2, dims.qk_nope_head_dim, dims.qk_head_dim());
  if (!is_full()) return turn(q_pe, 0, rows.tokens);
  turn(p.decode_q_pe, 0, rows.decodes);
  turn(q_pe, rows.decodes, rows.tokens);
}

void MlaLayer::State::finish(const OpContext& ctx, const StepRows& rows, const Projected& p,
                             const TensorView& out) const {
  if (!is_full()) return o_proj(ctx, p.out.fuse(1), out);
  w_uv_o(ctx, p.decode_out_latent.fuse(1), out.slice(0, 0, rows.decodes));
  o_proj(ctx, p.out.fuse(1), out.slice(0, rows.decodes, rows.tokens));
}

template <class Finish>
void MlaLayer::State::run(const OpContext& ctx, const TensorView& hidden, const AttentionStep& step,
                          const PagedKvCache& cache, Finish&& finish) const {
  const StepRows rows{step.plan->num_actual_tokens, step.plan->split.num_decode_tokens};
  WorkspaceScope scope(*ctx.workspace);
  const Projected p = take(scope, rows);
  project(ctx, hidden.slice(0, 0, rows.tokens), rows, p);
  if (rotary) rotate(ctx, rows, flat_positions(step.positions), p);

  AttentionStep actual = step;  // Without the padding rows.
  if (step.slot_mapping) actual.slot_mapping = step.slot_mapping.slice(0, 0, rows.tokens);
  const TensorView latent = latent_rows(p);
  MlaAttention::Operands operands{.q = p.q,
                                  .kv_c = latent.slice(1, 0, dims.kv_lora_rank),
                                  .k_pe = latent.slice(1, dims.kv_lora_rank, dims.latent_dim()),
                                  .out = p.out,
                                  .decode_q_latent = p.decode_q_latent,
                                  .decode_q_pe = p.decode_q_pe,
                                  .decode_out_latent = p.decode_out_latent};
  if (rows.all_decode()) {
    operands.kv_norm_weight = kv_a_layernorm;
    operands.kv_norm_eps = options.rms_norm_eps;
    if (rotary) operands.k_rope = rotary->angles(flat_positions(step.positions));
  }
  attention(ctx, operands, actual, cache);
  finish(rows, p);
}

// ---------------------------------------------------------------- the layer

MlaLayer::MlaLayer(const MlaDims& dims, const MlaWeights& weights,
                   std::shared_ptr<const RotaryEmbedding> rotary, const MlaOptions& options)
    : state_(std::make_unique<State>(dims, weights, std::move(rotary), options)) {}
MlaLayer::~MlaLayer() = default;
MlaLayer::MlaLayer(MlaLayer&&) noexcept = default;
MlaLayer& MlaLayer::operator=(MlaLayer&&) noexcept = default;

const MlaDims& MlaLayer::dims() const { return state_->dims; }
DType MlaLayer::dtype() const { return state_->dtype; }

void MlaLayer::operator()(const OpContext& ctx, const TensorView& hidden, const TensorView& out,
                          const AttentionStep& step, const PagedKvCache& cache) const {
  const State& s = *state_;
  check_step(step, hidden, s.dtype, s.dims.hidden_size, s.rotary.get());
  check_rows("out", out, s.dtype, {hidden.shape[0], s.dims.hidden_size});
  if (step.plan == nullptr) {
    take_worst_case(ctx, workspace_bytes(ctx, step.profile_limits));
    return fill_zero(ctx, out);
  }
  check_workspace(ctx, workspace_bytes(ctx, *step.plan));
  s.run(ctx, hidden, step, cache, [&](const State::StepRows& rows, const State::Projected& p) {
    s.finish(ctx, rows, p, out.slice(0, 0, rows.tokens));
    fill_zero(ctx, out.slice(0, rows.tokens, out.shape[0]));
  });
}

void MlaLayer::operator()(const OpContext& ctx, const TensorView& hidden,
                          const QuantizedOutput& attended, const AttentionStep& step,
                          const PagedKvCache& cache) const {
  const State& s = *state_;
  const std::int64_t width = s.dims.num_heads * s.dims.v_head_dim;
  FOVEA_CHECK(!s.is_full(), unsupported,
              "attended is asked of a layer with absorption full, but must be of one with "
              "two_step: W_UV_O holds o_proj");
  check_step(step, hidden, s.dtype, s.dims.hidden_size, s.rotary.get());
  check_quantized_output(attended, hidden.shape[0], width);
  if (step.plan == nullptr) {
    take_worst_case(ctx, workspace_bytes(ctx, step.profile_limits));
    return quantize_output(ctx, {no_rows(ctx, s.dtype, width), attended});
  }
  check_workspace(ctx, workspace_bytes(ctx, *step.plan));
  s.run(ctx, hidden, step, cache, [&](const State::StepRows&, const State::Projected& p) {
    quantize_output(ctx, {p.out.fuse(1), attended});
  });
}

void MlaLayer::prepare(const OpContext& ctx, const AttentionStep& step,
                       const PagedKvCache& cache) const {
  state_->attention.prepare(ctx, step, cache);
}

std::int64_t MlaLayer::prepared_bytes(const OpContext& ctx, const BatchPlan& plan) const {
  return state_->attention.prepared_bytes(ctx, plan);
}

std::int64_t MlaLayer::workspace_bytes(const OpContext& ctx, const BatchPlan& plan) const {
  return state_->workspace_bytes({plan.num_actual_tokens, plan.split.num_decode_tokens},
                                 state_->attention.workspace_bytes(ctx, plan));
}

std::int64_t MlaLayer::workspace_bytes(const OpContext& ctx, const AttentionLimits& limits) const {
  const std::int64_t attention = state_->attention.workspace_bytes(ctx, limits);
  const std::int64_t decodes =
      std::min(limits.max_tokens, limits.max_num_seqs * limits.max_decode_query_len);
  // Rows are decodes or prefills, and with full absorption either kind may be the larger.
  const State::StepRows no_decodes{limits.max_tokens, 0}, most_decodes{limits.max_tokens, decodes};
  // A mixture may be rounded up at each of five takes where these two are not.
  constexpr std::int64_t kRounding = 5 * Workspace::kAlignment;
  return std::max(state_->projected_bytes(no_decodes), state_->projected_bytes(most_decodes)) +
         kRounding +
         std::max(
             {state_->products_bytes(no_decodes), state_->products_bytes(most_decodes), attention});
}

std::int64_t MlaLayer::weight_bytes() const {
  const State& s = *state_;
  std::int64_t bytes = s.fused_a.weight_bytes() + s.q_b_proj.weight_bytes() +
                       s.attention.weight_bytes() + s.o_proj.weight_bytes() +
                       s.q_a_layernorm.nbytes() + s.kv_a_layernorm.nbytes();
  if (s.is_full()) {
    bytes += s.w_q_uk.weight_bytes() + s.w_qr.weight_bytes() + s.w_uv_o.weight_bytes();
  }
  return bytes;
}

void MlaLayer::reload(const MlaWeights& w) {
  State& s = *state_;
  check_weights(s.dims, w, s.dtype, s.options);
  const MlaProjections p(w);
  const FusedA a(s.dims, w, s.dtype);
  check_reload(a.weight.projection, s.fused_a);
  check_reload(p.q_b, s.q_b_proj);
  check_reload(p.o, s.o_proj);
  if (p.kv_b.is_quantized()) {
    s.attention.reload(p.kv_b.quantized(), w.kv_b_order, w.sinks);
  } else {
    s.attention.reload(w.kv_b_proj, w.kv_b_order, w.sinks);
  }
  fovea::reload(a.weight.projection, a.bias, s.fused_a);
  if (s.dims.q_lora_rank > 0) s.q_a_layernorm.assign(w.q_a_layernorm);
  s.kv_a_layernorm.assign(w.kv_a_layernorm);
  fovea::reload(p.q_b, {}, s.q_b_proj);
  fovea::reload(p.o, w.o_bias, s.o_proj);
  if (!s.is_full()) return;
  const AbsorbedWeights absorbed = absorb(s.dims, w, s.dtype, s.options.requantize_absorbed);
  fovea::reload(absorbed.w_q_uk.projection, {}, s.w_q_uk);
  fovea::reload(absorbed.w_qr.projection, {}, s.w_qr);
  fovea::reload(absorbed.w_uv_o.projection, w.o_bias, s.w_uv_o);
}

}  // namespace fovea
