// W_UK and W_UV in FP8 or FP4, head by head, as the products of decode take them.
#pragma once

#include <span>
#include <vector>

#include "fovea/mla.h"
#include "layers/projection.h"

namespace fovea {

class AbsorbedHeads {
 public:
  /// Of a checked kv_b_proj; `products` are not dense. Throws Error(invalid_argument) that names
  /// what kv_b_proj or the dims must be for them.
  AbsorbedHeads(AbsorbedProducts products, const MlaDims& dims, const Projection& kv_b_proj,
                KvBOrder order);

  std::span<const QuantizedWeight> w_uk() const { return w_uk_; }  ///< N of [L, P]
  std::span<const QuantizedWeight> w_uv() const { return w_uv_; }  ///< N of [V, L]

 private:
  void take_blocks(const MlaDims& dims, const Projection& kv_b_proj, KvBOrder order);
  void round(AbsorbedProducts products, const MlaDims& dims, const Projection& kv_b_proj,
             KvBOrder order);

  std::vector<Tensor> memory_;
  std::vector<QuantizedWeight> w_uk_, w_uv_;
};

}  // namespace fovea
