// Multi-head latent attention: dimensions, weights, the attention itself and the layer around it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "fovea/attention_step.h"
#include "fovea/linear.h"
#include "fovea/ops.h"
#include "fovea/rotary.h"

namespace fovea {

struct Projection;

/// Head counts and ranks of a layer. In comments N, Lq, L, P, R, V, H.
struct MlaDims {
  std::int64_t hidden_size = 0;       ///< H
  std::int64_t num_heads = 0;         ///< N
  std::int64_t q_lora_rank = 0;       ///< Lq; 0: queries come straight from the hidden states.
  std::int64_t kv_lora_rank = 0;      ///< L
  std::int64_t qk_nope_head_dim = 0;  ///< P
  std::int64_t qk_rope_head_dim = 0;  ///< R
  std::int64_t v_head_dim = 0;        ///< V
  /// The one softmax scale, YaRN's mscale^2 included. 0 takes (P + R)^-0.5.
  float sm_scale = 0.f;

  std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  std::int64_t latent_dim() const { return kv_lora_rank + qk_rope_head_dim; }
  /// With sm_scale filled in. Throws Error(invalid_argument) that names the field.
  MlaDims validated() const;
};

/// Output columns of kv_b_proj.
enum class KvBOrder : std::uint8_t {
  per_head,  ///< Head by head: P key columns, then V value columns (checkpoints, vLLM).
  grouped,   ///< All heads' keys [N * P], then all heads' values [N * V] (TensorRT-LLM).
};

/// Weights as stored in a checkpoint, [out, in]. Views; the layer copies what it keeps. A
/// projection may be FP8 (f8e4m3fn) with a scale, and stays one byte per weight. Those that share
/// one product (q_a and kv_a) must then have groups of one width; of a mixed pair both become
/// dense.
struct MlaWeights {
  TensorView q_a_proj;        ///< [Lq, H]; absent without Lq.
  TensorView q_a_bias;        ///< Optional [Lq].
  TensorView q_a_layernorm;   ///< [Lq]; absent without Lq.
  TensorView q_b_proj;        ///< [N * (P + R), Lq or H]; q_proj without Lq.
  TensorView kv_a_proj;       ///< [L + R, H]
  TensorView kv_a_bias;       ///< Optional [L + R].
  TensorView kv_a_layernorm;  ///< [L]
  TensorView kv_b_proj;       ///< [N * (P + V), L]
  TensorView o_proj;          ///< [H, N * V]
  TensorView o_bias;          ///< Optional [H].
  TensorView sinks = {};      ///< Optional [N] of any compute dtype: raw logits.
  KvBOrder kv_b_order = KvBOrder::per_head;
  // Of the projections that are FP8.
  WeightScale q_a_proj_scale = {};
  WeightScale q_b_proj_scale = {};
  WeightScale kv_a_proj_scale = {};
  WeightScale kv_b_proj_scale = {};
  WeightScale o_proj_scale = {};
};

enum class MlaAbsorption : std::uint8_t {
  two_step,  ///< Decode multiplies by W_UK and W_UV; prefill and decode share the projections.
  full,      ///< Decode multiplies by W_Q_UK and W_UV_O, made at load; more memory.
};

/// What decode multiplies queries with W_UK and attention's output with W_UV in. All but `dense`
/// cost accuracy, in decode alone: prefills expand kv_b_proj as it is.
enum class AbsorbedProducts : std::uint8_t {
  dense,       ///< The layer's dtype.
  fp8_blocks,  ///< The codes of a kv_b_proj in FP8 blocks, which must divide P, V and L; inputs are
               ///< rounded to FP8, in groups of a block's width.
  fp8,         ///< W_UK and W_UV are rounded to FP8 under a scale each, inputs under one per head.
  mxfp4,       ///< W_UK and W_UV are rounded to MXFP4; P and L must be multiples of 32.
};

struct MlaOptions {
  MlaAbsorption absorption = MlaAbsorption::two_step;
  float rms_norm_eps = 1e-6f;
  LinearBackend linear = LinearBackend::automatic;
  /// What the layer computes in. Default: the dtype of kv_a_proj, or of kv_a_layernorm where
  /// kv_a_proj is FP8.
  std::optional<DType> dtype = {};
  /// W_Q_UK and W_UV_O are FP8 too, in the groups of q_b_proj, kv_b_proj and o_proj, which must be
  /// alike. Costs accuracy: these weights are rounded once more. Full absorption only.
  bool requantize_absorbed = false;
  /// Above 0: queries of decode, latent and rope parts as one, are f8e4m3fn under this one scale.
  /// They saturate. Queries of prefills stay as they are.
  float q_scale = 0.f;
  AbsorbedProducts absorbed_products = AbsorbedProducts::dense;  ///< Two steps only.
  MemorySource memory = {};  ///< Where weights are kept: that of the contexts which will compute.
};

/// kv_b_proj as the absorbed form multiplies with it: views of its memory.
struct MlaUpProjections {
  TensorView w_uk;  ///< [N, P, L]
  TensorView w_uv;  ///< [N, L, V]
};
/// `kv_b_proj` [N * (P + V), L]; throws Error(invalid_argument) that prints all of its numbers.
MlaUpProjections mla_up_projections(const MlaDims& dims, const TensorView& kv_b_proj,
                                    KvBOrder order);

/// What MlaAttention takes besides kv_b_proj.
struct MlaAttentionOptions {
  KvBOrder order = KvBOrder::per_head;
  LinearBackend linear = LinearBackend::automatic;
  /// With MlaAbsorption::full the weights of decode are left out: the caller brings queries in the
  /// latent space.
  MlaAbsorption absorption = MlaAbsorption::two_step;
  TensorView sinks = {};  ///< As in MlaWeights.
  float q_scale = 0.f;    ///< As in MlaOptions.
  AbsorbedProducts absorbed_products = AbsorbedProducts::dense;  ///< As in MlaOptions.
  MemorySource memory = {};                                      ///< As in MlaOptions.
};

/// Attention over already projected operands, before o_proj: expanded prefill with context chunks,
/// absorbed decode. Immutable but for `reload`.
class MlaAttention {
 public:
  MlaAttention() = default;
  /// `kv_b_proj` as for mla_up_projections.
  MlaAttention(const MlaDims& dims, const TensorView& kv_b_proj,
               const MlaAttentionOptions& options = {});
  /// FP8: keys and values are expanded from the codes; dense W_UK and W_UV are of `dtype`.
  MlaAttention(const MlaDims& dims, const QuantizedWeight& kv_b_proj, DType dtype,
               const MlaAttentionOptions& options = {});

  const MlaDims& dims() const { return dims_; }
  DType dtype() const { return kv_b_proj_.dtype(); }
  std::int64_t weight_bytes() const;

  /// All of dtype(). Rows are tokens, decodes first; Td is the number of decode tokens. With full
  /// absorption `q` and `out` are [T - Td, ...]: the rows after the decodes.
  struct Operands {
    TensorView q;     ///< [T, N, P + R], rope part already rotated.
    TensorView kv_c;  ///< [T, L], normed; unit innermost stride.
    TensorView k_pe;  ///< [T, R], rotated.
    TensorView out;   ///< [T, N, V]; unit innermost stride.
    // Full absorption only.
    TensorView decode_q_latent = {};    ///< [Td, N, L], q_nope through W_UK.
    TensorView decode_q_pe = {};        ///< [Td, N, R], rotated.
    TensorView decode_out_latent = {};  ///< [Td, N, L], written.
    // What the stored rows still lack, where all rows are decodes: prefills read kv_c and k_pe.
    TensorView kv_norm_weight = {};  ///< [L]: kv_c is not normed.
    float kv_norm_eps = 1e-6f;
    RopeAngles k_rope = {};  ///< With cos_sin: k_pe is not rotated.
  };
  /// Appends the new rows to `cache`, then attends. Every row of `out` is written: rows past the
  /// plan's tokens with zeros. Whatever is wrong is said before anything is written.
  void operator()(const OpContext& ctx, const Operands& operands, const AttentionStep& step,
                  const PagedKvCache& cache) const;
  /// Brings what decode needs of the step's plan to where it runs, into step.prepared, for all
  /// layers of these dims whose caches have this format and block size. As prepare() of mla_decode.
  void prepare(const OpContext& ctx, const AttentionStep& step, const PagedKvCache& cache) const;
  /// Of step.prepared, u8, for any cache.
  std::int64_t prepared_bytes(const OpContext& ctx, const BatchPlan& plan) const;

  /// Scratch of a step: exactly what it takes.
  std::int64_t workspace_bytes(const OpContext& ctx, const BatchPlan& plan) const;
  /// Scratch that suffices for every step within `limits`.
  std::int64_t workspace_bytes(const OpContext& ctx, const AttentionLimits& limits) const;
  /// New values in the same storage; sinks as before there or absent.
  void reload(const TensorView& kv_b_proj, KvBOrder order, const TensorView& sinks = {});
  void reload(const QuantizedWeight& kv_b_proj, KvBOrder order, const TensorView& sinks = {});

 private:
  struct PrefillRows;
  struct Expanded;
  void check(const OpContext& ctx, const Operands& operands, const AttentionStep& step,
             const PagedKvCache& cache) const;
  void decode(const OpContext& ctx, const Operands& operands, const AttentionStep& step,
              const PagedKvCache& cache) const;
  void prefill(const OpContext& ctx, const PrefillRows& rows, const AttentionStep& step,
               const PagedKvCache& cache) const;
  void attend_new_tokens(const OpContext& ctx, const PrefillRows& rows, const BatchPlan& plan,
                         const AttentionState& result) const;
  void attend_chunk(const OpContext& ctx, const PrefillRows& rows, const ContextChunk& chunk,
                    const AttentionStep& step, const PagedKvCache& cache,
                    const AttentionState& context) const;
  MlaAttention(const MlaDims& dims, const Projection& kv_b_proj, DType dtype,
               const MlaAttentionOptions& options);
  void reload(const Projection& kv_b_proj, KvBOrder order, const TensorView& sinks);
  void make_absorbed(const Projection& kv_b_proj, DType dtype, const MlaAttentionOptions& options);
  void reload_absorbed(const Projection& kv_b_proj);
  Expanded split_expanded(const TensorView& kv) const;
  TensorView sinks() const { return sinks_ ? sinks_.view() : TensorView{}; }

  /// Operands that have shapes alone.
  MlaDecodeParams decode_shapes(const DecodeSchedule& schedule, const AttentionVariant& variant,
                                const PagedKvCache& cache) const;
  std::int64_t decode_bytes(const OpContext& ctx, const DecodeSchedule& schedule,
                            const AttentionVariant& variant, std::int64_t tokens) const;
  std::int64_t attention_bytes(const OpContext& ctx, const PrefillSchedule& schedule,
                               std::int64_t queries, std::int64_t keys) const;
  std::int64_t expanded_bytes(std::int64_t keys) const;
  std::int64_t state_bytes(std::int64_t tokens) const;
  std::int64_t new_tokens_bytes(std::int64_t tokens, std::int64_t attention) const;
  std::int64_t chunk_bytes(std::int64_t queries, std::int64_t keys, bool merges,
                           std::int64_t attention) const;

  MlaDims dims_;
  KvBOrder order_ = KvBOrder::per_head;
  Linear kv_b_proj_;      ///< Expands latent rows for prefill.
  BatchedLinear absorb_;  ///< q_nope [T, N, P] -> [T, N, L]; two steps only.
  BatchedLinear v_up_;    ///< Latent output [T, N, L] -> [T, N, V]; two steps only.
  Tensor sinks_;          ///< f32 [N] or absent.
  float q_scale_ = 0.f;   ///< 0: queries are not quantised.
  AbsorbedProducts absorbed_products_ = AbsorbedProducts::dense;
};

/// The whole attention layer of a model: projections, norms, rotation, attention, o_proj.
class MlaLayer {
 public:
  MlaLayer(const MlaDims& dims, const MlaWeights& weights,
           std::shared_ptr<const RotaryEmbedding> rotary, const MlaOptions& options = {});
  ~MlaLayer();
  MlaLayer(MlaLayer&&) noexcept;
  MlaLayer& operator=(MlaLayer&&) noexcept;

  const MlaDims& dims() const;
  DType dtype() const;

  /// out [T, H] = layer(hidden [T, H]), after o_proj, both of dtype(). Window, chunk, soft cap and
  /// draft tree are the plan's, whose context_plan must not be ContextPlanKind::paged: prefills
  /// expand context chunk by chunk. Rows past the plan's tokens are not read and come out as zeros.
  /// Without a plan (profile run): zeros, after reserving and taking the workspace that the worst
  /// step needs.
  void operator()(const OpContext& ctx, const TensorView& hidden, const TensorView& out,
                  const AttentionStep& step, const PagedKvCache& cache) const;
  /// The same up to o_proj, for a caller with a product of his own behind it: what attention gives,
  /// [T, N * V], as quantize_output writes it. In the same workspace, of which it may leave some.
  /// Error(unsupported) with full absorption, whose decode has no such rows.
  void operator()(const OpContext& ctx, const TensorView& hidden, const QuantizedOutput& attended,
                  const AttentionStep& step, const PagedKvCache& cache) const;

  /// Before the steps of a plan's layers, once: see MlaAttention::prepare.
  void prepare(const OpContext& ctx, const AttentionStep& step, const PagedKvCache& cache) const;
  std::int64_t prepared_bytes(const OpContext& ctx, const BatchPlan& plan) const;

  /// Scratch of a step: exactly what it takes.
  std::int64_t workspace_bytes(const OpContext& ctx, const BatchPlan& plan) const;
  /// Scratch that suffices for every step within `limits`.
  std::int64_t workspace_bytes(const OpContext& ctx, const AttentionLimits& limits) const;
  std::int64_t weight_bytes() const;
  /// New values in the same storage. Same shapes, dtypes and groups of weights.
  void reload(const MlaWeights& weights);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
