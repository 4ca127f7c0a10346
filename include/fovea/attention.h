// Grouped-query attention: dimensions, weights and the layer around it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fovea/attention_step.h"
#include "fovea/linear.h"
#include "fovea/ops.h"
#include "fovea/rotary.h"

namespace fovea {

/// Head counts and widths of a layer. In comments N, Hk, D, Dv, H.
struct GqaDims {
  std::int64_t hidden_size = 0;   ///< H
  std::int64_t num_heads = 0;     ///< N
  std::int64_t num_kv_heads = 0;  ///< Hk, divides N; 0 takes N.
  std::int64_t head_dim = 0;      ///< D of queries and keys; 0 takes H / N, which must be whole.
  std::int64_t v_head_dim = 0;    ///< Dv; 0 takes D.
  float q_scaling = 1.f;          ///< Divides the scores, besides sqrt(D).
  /// The one softmax scale. 0 takes 1 / (sqrt(D) * q_scaling).
  float sm_scale = 0.f;

  std::int64_t q_size() const { return num_heads * head_dim; }
  std::int64_t k_size() const { return num_kv_heads * head_dim; }
  std::int64_t v_size() const { return num_kv_heads * v_head_dim; }
  std::int64_t qkv_size() const { return q_size() + k_size() + v_size(); }
  std::int64_t out_size() const { return num_heads * v_head_dim; }
  /// With all defaults filled in. Throws Error(invalid_argument) that names the field.
  GqaDims validated() const;
};

enum class QkNorm : std::uint8_t {
  none,
  pre_rope,   ///< q and k are normed, then rotated.
  post_rope,  ///< q and k are rotated, then normed.
};

/// One adapter of a layer. Of the projections that feed attention it has either `qkv` or any of q,
/// k and v; absent ones change nothing.
struct AttentionLora {
  LoraWeights qkv;  ///< out: q_size + k_size + v_size.
  LoraWeights q;
  LoraWeights k;
  LoraWeights v;
  LoraWeights o;
};

/// Weights as stored in a checkpoint, [out, in]. Views; the layer copies what it keeps. Either
/// qkv_proj or q_proj, k_proj and v_proj; they come out alike. A projection may be FP8 (f8e4m3fn)
/// with a scale, and stays one byte per weight. q, k and v share one product: their groups must
/// then have one width, and where only some are FP8 all become dense.
struct AttentionWeights {
  TensorView qkv_proj;  ///< [qkv_size, H], rows of q, then k, then v.
  TensorView qkv_bias;  ///< Optional [qkv_size].
  TensorView q_proj;    ///< [q_size, H]
  TensorView q_bias;    ///< Optional [q_size].
  TensorView k_proj;    ///< [k_size, H]
  TensorView k_bias;    ///< Optional [k_size].
  TensorView v_proj;    ///< [v_size, H]
  TensorView v_bias;    ///< Optional [v_size].
  TensorView q_norm;    ///< With QkNorm: [D], of each head, or [q_size], over all heads at once.
  TensorView k_norm;    ///< With QkNorm: [D] or [k_size], as q_norm.
  TensorView o_proj;    ///< [H, out_size]
  TensorView o_bias;    ///< Optional [H].
  TensorView sinks;     ///< Optional [N] of any compute dtype: raw logits.
  std::vector<AttentionLora> lora = {};  ///< Adapters that rows choose by index.
  // Of the projections that are FP8.
  WeightScale qkv_proj_scale = {};
  WeightScale q_proj_scale = {};
  WeightScale k_proj_scale = {};
  WeightScale v_proj_scale = {};
  WeightScale o_proj_scale = {};
};

enum class RopeFusion : std::uint8_t {
  automatic,  ///< Keys turn on the way into the cache unless QkNorm::post_rope forbids it.
  fused,      ///< As automatic; refused with QkNorm::post_rope.
  separate,   ///< Queries and keys turn before anything is stored.
};

struct AttentionOptions {
  QkNorm qk_norm = QkNorm::none;
  float rms_norm_eps = 1e-6f;  ///< Of q_norm and k_norm.
  RopeFusion rope_fusion = RopeFusion::automatic;
  LinearBackend linear = LinearBackend::automatic;
  /// What the layer computes in. Default: the dtype of the first projection that is not FP8, in the
  /// order qkv, q, k, v, o; where all are FP8 it must be given.
  std::optional<DType> dtype = {};
  MemorySource memory = {};  ///< Where weights are kept: that of the contexts which will compute.
};

/// Keys and values of one layer, under one block table.
struct GqaCache {
  PagedKvCache k;  ///< Rows of Hk * D.
  PagedKvCache v;  ///< Rows of Hk * Dv.
  /// Both as columns of a cache with rows [K | V] of Hk * (D + Dv) elements.
  static GqaCache columns_of(const PagedKvCache& cache, const GqaDims& dims);
};

/// The whole attention layer of a model: projections, QK-norm, rotation, attention, o_proj. Window,
/// chunk and soft cap are those of the step's plan, so that one layer serves several.
class AttentionLayer {
 public:
  /// `rotary` may be null: nothing turns. Its width may be less than D: the first channels turn.
  /// Throws Error(invalid_argument) that names the weight or option.
  AttentionLayer(const GqaDims& dims, const AttentionWeights& weights,
                 std::shared_ptr<const RotaryEmbedding> rotary,
                 const AttentionOptions& options = {});
  ~AttentionLayer();
  AttentionLayer(AttentionLayer&&) noexcept;
  AttentionLayer& operator=(AttentionLayer&&) noexcept;

  const GqaDims& dims() const;
  DType dtype() const;

  /// out [T, H] = layer(hidden [T, H]), after o_proj, both of dtype(). The new rows are appended to
  /// the cache, then attention reads all keys from it (but prefills their new tokens as they are,
  /// where the cache would round them): the plan's context_plan must be ContextPlanKind::paged.
  /// Rows past the plan's tokens are not read and come out as zeros. Without a plan (profile run):
  /// zeros, after reserving and taking the workspace of the worst step.
  void operator()(const OpContext& ctx, const TensorView& hidden, const TensorView& out,
                  const AttentionStep& step, const GqaCache& cache) const;
  /// The same up to o_proj, for a caller with a product of his own behind it: what attention gives,
  /// [T, N * Dv], as quantize_output writes it. In the same workspace, of which it may leave some.
  /// The bias and the adapters of o_proj are the caller's too.
  void operator()(const OpContext& ctx, const TensorView& hidden, const QuantizedOutput& attended,
                  const AttentionStep& step, const GqaCache& cache) const;

  /// Brings what decode needs of the step's plan to where it runs, into step.prepared, once for all
  /// layers of these dims whose caches have this format and block size.
  void prepare(const OpContext& ctx, const AttentionStep& step, const GqaCache& cache) const;
  /// Of step.prepared, u8, for any cache.
  std::int64_t prepared_bytes(const OpContext& ctx, const BatchPlan& plan) const;

  /// Scratch of a step: exactly what it takes.
  std::int64_t workspace_bytes(const OpContext& ctx, const BatchPlan& plan) const;
  /// Scratch that suffices for every step within `limits`.
  std::int64_t workspace_bytes(const OpContext& ctx, const AttentionLimits& limits) const;
  std::int64_t weight_bytes() const;
  /// New values in the same storage. Same shapes, dtypes and groups of weights.
  void reload(const AttentionWeights& weights);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
