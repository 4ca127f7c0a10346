// Weights of an MlaLayer: what they must be, and as the layer holds them.
#pragma once

#include "fovea/mla.h"
#include "layers/projection.h"

namespace fovea {

/// Views of a layer's projections, by the names that error texts use.
struct MlaProjections {
  explicit MlaProjections(const MlaWeights& weights);
  Projection q_a;  ///< Absent without Lq.
  Projection q_b;
  Projection kv_a;
  Projection kv_b;
  Projection o;
};

/// What the layer computes in.
DType weights_dtype(const MlaWeights& weights, const MlaOptions& options);

/// Throws Error(invalid_argument) unless every weight fits dims, all but the norms and FP8
/// projections of `dtype`, and those are requantisable where `options` ask for it.
void check_weights(const MlaDims& dims, const MlaWeights& weights, DType dtype,
                   const MlaOptions& options);

/// q_a_proj and kv_a_proj read the same hidden states: one product of Lq + L + R columns.
struct FusedA {
  FusedA(const MlaDims& dims, const MlaWeights& weights, DType dtype);
  OwnedProjection weight;  ///< [Lq + L + R, H]
  Tensor bias;             ///< [Lq + L + R] or absent
};

}  // namespace fovea
