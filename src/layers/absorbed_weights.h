// Weights of full absorption, made once from those of the checkpoint.
#pragma once

#include "fovea/mla.h"
#include "layers/mla_weights.h"

namespace fovea {

/// With X being Lq or H.
struct AbsorbedWeights {
  OwnedProjection w_q_uk;  ///< [N * L, X] from a query's input to its latent form.
  OwnedProjection w_qr;    ///< [N * R, X] the rope rows of q_b_proj.
  OwnedProjection w_uv_o;  ///< [H, N * L] from the latent output to the layer's.
};

/// Of checked weights. What is multiplied out is of `dtype`, or FP8 in the groups of q_b_proj;
/// w_qr is FP8 where q_b_proj is.
AbsorbedWeights absorb(const MlaDims& dims, const MlaWeights& weights, DType dtype,
                       bool requantize);

}  // namespace fovea
