// Weights of full absorption, made once from those of the checkpoint.
#pragma once

#include "fovea/mla.h"

namespace fovea {

/// Rows of q_b_proj [N * (P + R), X], X being Lq or H.
struct QueryProjections {
  TensorView nope;  ///< [N, P, X]
  TensorView rope;  ///< [N, R, X]
};
QueryProjections query_projections(const MlaDims& dims, const TensorView& q_b_proj);

/// W_Q_UK [N * L, X]: from a query's input to its latent form, q_nope and W_UK in one.
Tensor absorb_query_projection(const MlaDims& dims, const TensorView& q_b_proj,
                               const TensorView& w_uk);
/// W_QR [N * R, X]: the rope rows alone.
Tensor rope_query_projection(const MlaDims& dims, const TensorView& q_b_proj);
/// W_UV_O [H, N * L]: from the latent output to the layer's, W_UV and o_proj in one.
Tensor absorb_output_projection(const MlaDims& dims, const TensorView& o_proj,
                                const TensorView& w_uv);

}  // namespace fovea
