// Multi-head latent attention: dimensions, weights, the attention itself and the layer around it.
#pragma once

#include <cstdint>
#include <memory>

#include "fovea/linear.h"
#include "fovea/ops.h"
#include "fovea/rotary.h"

namespace fovea {

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

/// Weights as stored in a checkpoint, [out, in]. Views; the layer copies what it keeps.
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
  KvBOrder kv_b_order = KvBOrder::per_head;
};

enum class MlaAbsorption : std::uint8_t {
  two_step,  ///< Decode multiplies by W_UK and W_UV; prefill and decode share the projections.
  full,      ///< Decode multiplies by W_Q_UK and W_UV_O, made at load; more memory.
};

struct MlaOptions {
  MlaAbsorption absorption = MlaAbsorption::two_step;
  float rms_norm_eps = 1e-6f;
  LinearBackend linear = LinearBackend::automatic;
};

/// A step's operands, shared by all layers of a KV group but for the cache.
struct MlaStep {
  const BatchPlan* plan = nullptr;  ///< Null: profile run (see MlaLayer::operator()).
  BlockTableView block_table;       ///< [requests of the batch, width], decodes first.
  TensorView slot_mapping;          ///< [T] i32 or i64; absent: nothing is appended.
  TensorView positions;             ///< [T] or [1, T]; may be absent when nothing is rotated.
};

/// Attention over already projected operands, before o_proj: expanded prefill with context chunks,
/// absorbed decode. Immutable but for `reload`.
class MlaAttention {
 public:
  MlaAttention() = default;
  /// `kv_b_proj` [N * (P + V), L]; throws Error(invalid_argument) that prints all of its numbers.
  MlaAttention(const MlaDims& dims, const TensorView& kv_b_proj, KvBOrder order,
               LinearBackend linear);

  const MlaDims& dims() const { return dims_; }

  struct Operands {
    TensorView q;     ///< [T, N, P + R], rope part already rotated.
    TensorView kv_c;  ///< [T, L], normed.
    TensorView k_pe;  ///< [T, R], rotated.
    TensorView out;   ///< [T, N, V]; unit innermost stride.
    /// Optional [decode tokens, N, L]: queries already in the latent space (full absorption), and
    /// where the decode rows' latent output goes; out's decode rows are then left alone.
    TensorView decode_q_latent;
    TensorView decode_out_latent;
  };
  /// Appends the new rows to `cache`, then attends. Every row of `out` is written: rows past the
  /// plan's tokens with zeros.
  void operator()(const OpContext& ctx, const Operands& operands, const MlaStep& step,
                  const PagedKvCache& cache) const;
  /// Scratch of a step, for any batch that `plan` describes.
  std::int64_t workspace_bytes(const OpContext& ctx, const BatchPlan& plan,
                               std::int64_t tokens, DType dtype) const;
  void reload(const TensorView& kv_b_proj, KvBOrder order);

  // Weights in the layouts of the absorbed form, for full absorption: [N, P, L] and [N, L, V].
  TensorView w_uk() const { return w_uk_; }
  TensorView w_uv() const { return w_uv_; }

 private:
  MlaDims dims_;
  Tensor w_uk_;
  Tensor w_uv_;
  Linear kv_b_proj_;      ///< Expands latent rows for prefill.
  BatchedLinear absorb_;  ///< q_nope [T, N, P] -> [T, N, L]
  BatchedLinear v_up_;    ///< latent output [T, N, L] -> [T, N, V]
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

  /// out [T, H] = layer(hidden [T, H]), after o_proj, both of dtype(). Rows past the plan's tokens
  /// come out as zeros. Without a plan (profile run): zeros, after taking the workspace that the
  /// worst step needs.
  void operator()(const OpContext& ctx, const TensorView& hidden, const TensorView& out,
                  const MlaStep& step, const PagedKvCache& cache) const;

  /// Scratch for a step of `tokens` rows under `plan`.
  std::int64_t workspace_bytes(const OpContext& ctx, const BatchPlan& plan,
                               std::int64_t tokens) const;
  /// Scratch that suffices for every step within these limits.
  struct Limits {
    std::int64_t max_tokens = 0;      ///< Rows of a step.
    std::int64_t max_num_seqs = 0;    ///< Requests of a step.
    std::int64_t workspace_rows = 0;  ///< Context rows of a chunk.
  };
  std::int64_t workspace_bytes(const OpContext& ctx, const Limits& limits) const;
  std::int64_t weight_bytes() const;
  /// New values in the same storage. Same shapes and dtype.
  void reload(const MlaWeights& weights);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
