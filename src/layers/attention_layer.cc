#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "fovea/attention.h"
#include "layers/attention_layer_state.h"
#include "layers/attention_weights.h"
#include "layers/rows.h"
#include "layers/step.h"
#include "ops/checks.h"
#include "ops/quantized_output.h"

namespace fovea {
namespace {

constexpr const char* kName = "attention_layer";

/// RMSNorm in place of heads [T, n, D] of fused rows: of each head, or of all of them at once.
void norm(const OpContext& ctx, const TensorView& heads, const TensorView& weight, float eps) {
  const auto run = [&](const TensorView& x) {
    rms_norm(ctx, {.x = x, .weight = weight, .out = x, .eps = eps});
  };
  const std::int64_t tokens = heads.shape[0], num_heads = heads.shape[1];
  if (weight.shape[0] != heads.shape[2]) return run(heads.fuse(1));  // [T, n * D]
  // No two of T, n and D can be fused in general: as few calls as there are of T and n.
  if (tokens < num_heads) {
    for (std::int64_t t = 0; t < tokens; ++t) run(heads.select(0, t));  // [n, D]
  } else {
    for (std::int64_t n = 0; n < num_heads; ++n) run(heads.select(1, n));  // [T, D]
  }
}

}  // namespace

AttentionLayer::State::State(const GqaDims& dims_, const AttentionWeights& w,
                             std::shared_ptr<const RotaryEmbedding> rotary_,
                             const AttentionOptions& options_)
    : dims(dims_.validated()),
      options(options_),
      dtype(weights_dtype(w, options)),
      rotary(std::move(rotary_)),
      rotates_on_append(rotary && options.rope_fusion != RopeFusion::separate &&
                        options.qk_norm != QkNorm::post_rope) {
  check_weights(dims, w, dtype, options);
  FOVEA_CHECK(options.rms_norm_eps >= 0 && std::isfinite(options.rms_norm_eps), invalid_argument,
              "rms_norm_eps is {}, but must be finite and not negative", options.rms_norm_eps);
  FOVEA_CHECK(
      options.rope_fusion != RopeFusion::fused || options.qk_norm != QkNorm::post_rope,
      invalid_argument,
      "rope_fusion is fused, but must be automatic or separate: QkNorm::post_rope norms keys that "
      "have turned");
  FOVEA_CHECK(!rotary || rotary->config().dim <= dims.head_dim, invalid_argument,
              "rotary turns {} channels, but must turn at most head_dim = {}",
              rotary ? rotary->config().dim : 0, dims.head_dim);
  const FusedQkv qkv(dims, w, dtype);
  qkv_proj = make_linear(qkv.weight.projection, qkv.bias, dtype, options.linear, options.memory);
  q_norm = Tensor::copy_of(w.q_norm, options.memory);
  k_norm = Tensor::copy_of(w.k_norm, options.memory);
  sinks = sinks_in_f32(w.sinks, options.memory);
  o_proj = make_linear(output_projection(w), w.o_bias, dtype, options.linear, options.memory);
  const AttentionLoraUpdates lora(dims, w.lora);
  qkv_lora = Lora(dims.hidden_size, dims.qkv_size(), dtype, lora.qkv, options.memory);
  o_lora = Lora(dims.out_size(), dims.hidden_size, dtype, lora.o, options.memory);
}

// ---------------------------------------------------------------- checks

void AttentionLayer::State::check(const AttentionStep& step, const TensorView& hidden,
                                  const GqaCache& cache) const {
  check_step(step, hidden, dtype, dims.hidden_size, rotary.get());
  if (step.plan == nullptr) return;
  if (step.lora_ids) check_lora_ids(step, hidden.shape[0], qkv_lora.num_adapters());
  FOVEA_CHECK(step.plan->paged_context, invalid_argument,
              "plan was made for context chunks, but this layer needs ContextPlanKind::paged");
  check_heads_cache(kName, &cache.k, dims.num_kv_heads, dims.head_dim, "Hk * D", "cache.k");
  check_heads_cache(kName, &cache.v, dims.num_kv_heads, dims.v_head_dim, "Hk * Dv", "cache.v");
  FOVEA_CHECK(
      cache.k.num_blocks() == cache.v.num_blocks() && cache.k.block_size() == cache.v.block_size(),
      invalid_argument, "cache.v has {} blocks of {}, but must have as many as cache.k, {} of {}",
      cache.v.num_blocks(), cache.v.block_size(), cache.k.num_blocks(), cache.k.block_size());
  check_blocks(kName, *step.plan, step.block_table, cache.k);
}

// ---------------------------------------------------------------- a step

AttentionLayer::State::Projected AttentionLayer::State::take(WorkspaceScope& scope,
                                                             std::int64_t tokens) const {
  const std::int64_t keys = dims.q_size(), values = keys + dims.k_size();
  Projected p;
  p.qkv = scope.take(dtype, {tokens, dims.qkv_size()});
  p.q = p.qkv.slice(1, 0, keys).split(1, dims.num_heads, dims.head_dim);
  p.k = p.qkv.slice(1, keys, values).split(1, dims.num_kv_heads, dims.head_dim);
  p.v = p.qkv.slice(1, values, dims.qkv_size()).split(1, dims.num_kv_heads, dims.v_head_dim);
  p.out = scope.take(dtype, {tokens, dims.num_heads, dims.v_head_dim});
  return p;
}

void AttentionLayer::State::project(const OpContext& ctx, const TensorView& hidden,
                                    const AttentionStep& step, const Projected& p) const {
  qkv_proj(ctx, hidden, p.qkv);  // [Ta, H] -> [Ta, q_size + k_size + v_size]
  if (step.lora_ids && qkv_lora) qkv_lora(ctx, hidden, step.lora_ids, p.qkv);
}

/// QK-norm and rotation, but for what gqa_append does on the way.
void AttentionLayer::State::prepare_keys(const OpContext& ctx, const AttentionStep& step,
                                         const Projected& p, bool turn_keys) const {
  const auto norm_both = [&] {
    norm(ctx, p.q, q_norm, options.rms_norm_eps);
    norm(ctx, p.k, k_norm, options.rms_norm_eps);
  };
  if (options.qk_norm == QkNorm::pre_rope) norm_both();
  if (rotary) {
    const std::int64_t width = rotary->config().dim;  // The rest of a head stays.
    (*rotary)(ctx, p.q.slice(2, 0, width), step.positions);
    if (turn_keys) (*rotary)(ctx, p.k.slice(2, 0, width), step.positions);
  }
  if (options.qk_norm == QkNorm::post_rope) norm_both();
}

void AttentionLayer::State::append(const OpContext& ctx, const AttentionStep& step,
                                   const Projected& p, const GqaCache& cache,
                                   bool turn_keys) const {
  GqaAppendParams params{.k = p.k,
                         .v = p.v,
                         .slot_mapping = step.slot_mapping,
                         .k_cache = &cache.k,
                         .v_cache = &cache.v,
                         .rope = {}};
  if (turn_keys) params.rope = rotary->angles(step.positions);
  gqa_append(ctx, params);
}

void AttentionLayer::State::attend(const OpContext& ctx, const AttentionStep& step,
                                   const Projected& p, const GqaCache& cache) const {
  const BatchPlan& plan = *step.plan;
  const std::int64_t actual = plan.num_actual_tokens, decodes = plan.split.num_decode_tokens;
  PagedKv kv{.k_cache = &cache.k,
             .v_cache = &cache.v,
             .block_table = requests_from(step.block_table, 0, plan.split.num_decodes),
             .num_kv_heads = dims.num_kv_heads};
  if (decodes > 0) {
    attention_decode(ctx, {.q = p.q.slice(0, 0, decodes),
                           .kv = kv,
                           .out = p.out.slice(0, 0, decodes),
                           .lse = {},
                           .schedule = &plan.decode,
                           .variant = plan.variant,
                           .sm_scale = dims.sm_scale,
                           .sinks = sinks_view(),
                           .prepared = step.prepared});
  }
  if (actual == decodes) return;
  kv.block_table = requests_from(step.block_table, plan.split.num_decodes, plan.split.num_prefills);
  const bool reads_fresh = !stores_as_is(cache);
  attention_prefill(ctx, {.q = p.q.slice(0, decodes, actual),
                          .k = reads_fresh ? p.k.slice(0, decodes, actual) : TensorView{},
                          .k_pe = {},
                          .v = reads_fresh ? p.v.slice(0, decodes, actual) : TensorView{},
                          .out = p.out.slice(0, decodes, actual),
                          .lse = {},
                          .schedule = &plan.prefill,
                          .variant = plan.variant,
                          .sm_scale = dims.sm_scale,
                          .paged = kv,
                          .sinks = sinks_view()});
}

template <class Finish>
void AttentionLayer::State::run(const OpContext& ctx, const TensorView& hidden,
                                const AttentionStep& step, const GqaCache& cache,
                                Finish&& finish) const {
  AttentionStep actual = step;  // Without the padding rows.
  const std::int64_t tokens = step.plan->num_actual_tokens;
  if (rotary) {
    const TensorView positions = flat_positions(step.positions);
    actual.positions = positions.slice(positions.ndim - 1, 0, tokens);
  }
  if (step.slot_mapping) actual.slot_mapping = step.slot_mapping.slice(0, 0, tokens);
  if (step.lora_ids) actual.lora_ids = step.lora_ids.slice(0, 0, tokens);

  WorkspaceScope scope(*ctx.workspace);
  const Projected p = take(scope, tokens);
  project(ctx, hidden.slice(0, 0, tokens), actual, p);
  // New tokens of prefills are read as they are, turned, where the cache would round them.
  const bool on_append = rotates_on_append && stores_as_is(cache);
  prepare_keys(ctx, actual, p, rotary && !on_append);
  if (actual.slot_mapping) append(ctx, actual, p, cache, on_append);
  attend(ctx, actual, p, cache);
  finish(p.out.fuse(1), actual);
}

// ---------------------------------------------------------------- the layer

AttentionLayer::AttentionLayer(const GqaDims& dims, const AttentionWeights& weights,
                               std::shared_ptr<const RotaryEmbedding> rotary,
                               const AttentionOptions& options)
    : state_(std::make_unique<State>(dims, weights, std::move(rotary), options)) {}
AttentionLayer::~AttentionLayer() = default;
AttentionLayer::AttentionLayer(AttentionLayer&&) noexcept = default;
AttentionLayer& AttentionLayer::operator=(AttentionLayer&&) noexcept = default;

const GqaDims& AttentionLayer::dims() const { return state_->dims; }
DType AttentionLayer::dtype() const { return state_->dtype; }

void AttentionLayer::operator()(const OpContext& ctx, const TensorView& hidden,
                                const TensorView& out, const AttentionStep& step,
                                const GqaCache& cache) const {
  const State& s = *state_;
  s.check(step, hidden, cache);
  check_rows("out", out, s.dtype, {hidden.shape[0], s.dims.hidden_size});
  if (step.plan == nullptr) {
    take_worst_case(ctx, workspace_bytes(ctx, step.profile_limits));
    return fill_zero(ctx, out);
  }
  check_workspace(ctx, workspace_bytes(ctx, *step.plan));
  s.run(ctx, hidden, step, cache, [&](const TensorView& attended, const AttentionStep& actual) {
    const TensorView rows = out.slice(0, 0, attended.shape[0]);
    s.o_proj(ctx, attended, rows);  // [Ta, N * Dv] -> [Ta, H]
    if (actual.lora_ids && s.o_lora) s.o_lora(ctx, attended, actual.lora_ids, rows);
    fill_zero(ctx, out.slice(0, attended.shape[0], out.shape[0]));
  });
}

void AttentionLayer::operator()(const OpContext& ctx, const TensorView& hidden,
                                const QuantizedOutput& attended, const AttentionStep& step,
                                const GqaCache& cache) const {
  const State& s = *state_;
  s.check(step, hidden, cache);
  check_quantized_output(attended, hidden.shape[0], s.dims.out_size());
  if (step.plan == nullptr) {
    take_worst_case(ctx, workspace_bytes(ctx, step.profile_limits));
    return quantize_output(ctx, {no_rows(ctx, s.dtype, s.dims.out_size()), attended});
  }
  check_workspace(ctx, workspace_bytes(ctx, *step.plan));
  s.run(ctx, hidden, step, cache, [&](const TensorView& rows, const AttentionStep&) {
    quantize_output(ctx, {rows, attended});
  });
}

std::int64_t AttentionLayer::weight_bytes() const {
  const State& s = *state_;
  return s.qkv_proj.weight_bytes() + s.o_proj.weight_bytes() + s.q_norm.nbytes() +
         s.k_norm.nbytes() + s.sinks.nbytes() + s.qkv_lora.weight_bytes() + s.o_lora.weight_bytes();
}

void AttentionLayer::reload(const AttentionWeights& w) {
  State& s = *state_;
  check_weights(s.dims, w, s.dtype, s.options);
  FOVEA_CHECK(static_cast<bool>(w.sinks) == static_cast<bool>(s.sinks), invalid_argument,
              "sinks are {}, but must be {} as when the layer was made",
              w.sinks ? "there" : "absent", s.sinks ? "there" : "absent");
  FOVEA_CHECK(!s.q_norm || w.q_norm.shape[0] == s.q_norm.view().shape[0], invalid_argument,
              "q_norm is {}, but must be [{}] as when the layer was made", to_string(w.q_norm),
              s.q_norm ? s.q_norm.view().shape[0] : 0);
  const FusedQkv qkv(s.dims, w, s.dtype);
  check_reload(qkv.weight.projection, s.qkv_proj);
  check_reload(output_projection(w), s.o_proj);
  const AttentionLoraUpdates lora(s.dims, w.lora);
  s.qkv_lora.reload(lora.qkv);
  s.o_lora.reload(lora.o);
  fovea::reload(qkv.weight.projection, qkv.bias, s.qkv_proj);
  fovea::reload(output_projection(w), w.o_bias, s.o_proj);
  if (s.q_norm) s.q_norm.assign(w.q_norm);
  if (s.k_norm) s.k_norm.assign(w.k_norm);
  if (s.sinks) s.sinks.assign(w.sinks);
}

}  // namespace fovea
