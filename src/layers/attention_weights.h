// Weights of an AttentionLayer: what they must be, and as the layer holds them.
#pragma once

#include <vector>

#include "fovea/attention.h"
#include "layers/projection.h"
#include "linear/lora.h"

namespace fovea {

/// What the layer computes in.
DType weights_dtype(const AttentionWeights& weights, const AttentionOptions& options);

/// Throws Error(invalid_argument) unless every weight that `options` need is there and fits, and no
/// other is. Projections are of `dtype` or FP8; norms, sinks and adapters may have a compute dtype
/// of their own.
void check_weights(const GqaDims& dims, const AttentionWeights& weights, DType dtype,
                   const AttentionOptions& options);

Projection output_projection(const AttentionWeights& weights);

/// One product of all columns, however the weights came.
struct FusedQkv {
  FusedQkv(const GqaDims& dims, const AttentionWeights& weights, DType dtype);
  OwnedProjection weight;  ///< [qkv_size, H]
  Tensor bias;             ///< [qkv_size] or absent
};

/// The adapters' updates of the fused product and of o_proj.
struct AttentionLoraUpdates {
  explicit AttentionLoraUpdates(const GqaDims& dims, const std::vector<AttentionLora>& adapters);
  std::vector<std::vector<LoraUpdate>> qkv;
  std::vector<std::vector<LoraUpdate>> o;
};

}  // namespace fovea
