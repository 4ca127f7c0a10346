// What an AttentionLayer holds.
#pragma once

#include "fovea/attention.h"
#include "linear/lora.h"

namespace fovea {

struct AttentionLayer::State {
  State(const GqaDims& dims, const AttentionWeights& weights,
        std::shared_ptr<const RotaryEmbedding> rotary, const AttentionOptions& options);

  /// Rows of the fused product, and what o_proj reads.
  struct Projected {
    TensorView qkv;  ///< [Ta, q_size + k_size + v_size]
    TensorView q;    ///< [Ta, N, D] of qkv
    TensorView k;    ///< [Ta, Hk, D] of qkv
    TensorView v;    ///< [Ta, Hk, Dv] of qkv
    TensorView out;  ///< [Ta, N, Dv]
  };

  void check(const AttentionStep& step, const TensorView& hidden, const GqaCache& cache) const;
  Projected take(WorkspaceScope& scope, std::int64_t tokens) const;
  void project(const OpContext& ctx, const TensorView& hidden, const AttentionStep& step,
               const Projected& projected) const;
  void prepare_keys(const OpContext& ctx, const AttentionStep& step, const Projected& projected,
                    bool turn_keys) const;
  void append(const OpContext& ctx, const AttentionStep& step, const Projected& projected,
              const GqaCache& cache, bool turn_keys) const;
  void attend(const OpContext& ctx, const AttentionStep& step, const Projected& projected,
              const GqaCache& cache) const;
  /// A checked step up to attention's output, then finish(attended [Ta, N * Dv], actual step).
  template <class Finish>
  void run(const OpContext& ctx, const TensorView& hidden, const AttentionStep& step,
           const GqaCache& cache, Finish&& finish) const;

  /// Operands that have shapes alone.
  AttentionDecodeParams decode_shapes(const DecodeSchedule& schedule,
                                      const AttentionVariant& variant, const PagedKv& kv) const;
  std::int64_t decode_bytes(const OpContext& ctx, const DecodeSchedule& schedule,
                            const AttentionVariant& variant) const;
  std::int64_t prefill_bytes(const OpContext& ctx, const PrefillSchedule& schedule) const;
  std::int64_t workspace_bytes(std::int64_t tokens, std::int64_t attention_bytes) const;
  /// What is appended comes back bit for bit.
  bool stores_as_is(const GqaCache& cache) const {
    return cache.k.format().dtype == dtype && cache.v.format().dtype == dtype;
  }
  TensorView sinks_view() const { return sinks ? sinks.view() : TensorView{}; }

  GqaDims dims;
  AttentionOptions options;
  DType dtype;
  std::shared_ptr<const RotaryEmbedding> rotary;
  bool rotates_on_append;  ///< Keys turn on the way into the cache.
  Linear qkv_proj;         ///< H -> q_size + k_size + v_size
  Tensor q_norm;           ///< [D] or [q_size]
  Tensor k_norm;           ///< [D] or [k_size]
  Tensor sinks;            ///< f32 [N]
  Linear o_proj;           ///< N * Dv -> H
  Lora qkv_lora;
  Lora o_lora;
};

}  // namespace fovea
