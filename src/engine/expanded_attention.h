// What an engine without a latent cache does, from the same ops and products: the other side of
// compare_methods.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/model.h"

namespace fovea::engine {

/// One layer's attention over expanded keys and values, for one request with one new token.
class ExpandedAttention {
 public:
  ExpandedAttention(const OpContext& ctx, const Model& model, std::int64_t layer,
                    std::int64_t num_keys);
  ExpandedAttention(const ExpandedAttention&) = delete;
  ExpandedAttention& operator=(const ExpandedAttention&) = delete;

  /// Scratch of everything below.
  std::int64_t workspace_bytes() const;

  /// Latent rows of tokens: normed [T, H] -> rows [T, L + R], rotated unless `positions` is absent.
  void latent_rows(const TensorView& normed, const TensorView& positions,
                   const TensorView& rows) const;
  void rotate_keys(const TensorView& rows, const TensorView& positions) const;

  /// The new token's output [1, H] from its normed hidden state [1, H], over the keys and values
  /// that lie in memory; its own are put last. Its latent row is left in new_row().
  void step_with_expanded_cache(const TensorView& normed, const TensorView& out);
  /// The same over latent rows [num_keys, L + R] that are expanded first.
  void step_expanding(const TensorView& normed, const TensorView& rows, const TensorView& out);
  /// What the last step_expanding expanded becomes the cache of step_with_expanded_cache.
  void keep_expanded(const TensorView& rows);

  TensorView new_row() const { return new_row_; }
  std::int64_t cache_bytes() const { return keys_.nbytes() + values_.nbytes(); }

 private:
  TensorView keys() const { return keys_.view().transpose(0, 1); }      ///< [num_keys, N, P + R]
  TensorView values() const { return values_.view().transpose(0, 1); }  ///< [num_keys, N, V]
  void project(const TensorView& normed);
  void attend(const TensorView& k, const TensorView& k_pe, const TensorView& v,
              const TensorView& out);
  AttentionPrefillParams attention_params() const;

  const OpContext& ctx_;
  const MlaWeights& weights_;
  MlaDims dims_;
  float eps_;
  RotaryEmbedding rotary_;
  Linear q_a_proj_, q_b_proj_, kv_a_proj_, kv_b_proj_, o_proj_;
  std::int64_t num_keys_;
  std::int64_t new_position_;
  PrefillSchedule schedule_;  ///< The query once for every part of the keys.

  Tensor q_a_;       ///< [1, Lq]
  Tensor q_;         ///< [1, N, P + R]
  Tensor new_row_;   ///< [1, L + R]
  Tensor new_kv_;    ///< [1, N, P + V]
  Tensor expanded_;  ///< [num_keys, N, P + V], of step_expanding.
  // A head's rows lie together, as in most caches of this kind: the kernel reads them head by head,
  // three times as fast as rows that are num_heads apart.
  Tensor keys_;      ///< [N, num_keys, P + R]
  Tensor values_;    ///< [N, num_keys, V]
  Tensor partial_;   ///< [parts, N, V] f32
  Tensor lse_;       ///< [N, parts]
  Tensor attended_;  ///< [1, N, V]
};

}  // namespace fovea::engine
