#include "layers/absorbed_weights.h"

#include <utility>

namespace fovea {
namespace {

/// out[t, n] = x[t, n] weight[n], all in f32: results are rounded once.
/// x [T, N, K], weight [N, K, M] of any strides.
Tensor multiply_heads(const TensorView& x, const TensorView& weight) {
  const auto pool = make_std_thread_pool();
  const Tensor x_f32 = Tensor::empty(DType::f32, {x.shape[0], x.shape[1], x.shape[2]});
  const Tensor weight_f32 =
      Tensor::empty(DType::f32, {weight.shape[0], weight.shape[1], weight.shape[2]});
  copy(x, x_f32);
  copy(weight, weight_f32);
  Tensor out = Tensor::empty(DType::f32, {x.shape[0], weight.shape[0], weight.shape[2]});
  const BatchedLinear product(weight_f32, LinearBackend::plain);
  Workspace workspace;
  workspace.reserve(product.workspace_bytes(x.shape[0]));
  product({pool.get(), &workspace}, x_f32, out);
  return out;
}

/// Rounds `product` [out, in], f32, to what the layer holds.
OwnedProjection rounded(const char* name, const TensorView& product, DType dtype,
                        const WeightGroups* requantized) {
  OwnedProjection result;
  if (requantized != nullptr) {
    OwnedQuantizedWeight weight = quantize_weight(product, *requantized);
    result.weight = std::move(weight.codes);
    result.scale = std::move(weight.scale);
    result.projection = {name, result.weight, {result.scale, *requantized}};
    return result;
  }
  result.weight = Tensor::empty(dtype, {product.shape[0], product.shape[1]});
  copy(product, result.weight);
  result.projection = {name, result.weight, {}};
  return result;
}

}  // namespace

AbsorbedWeights absorb(const MlaDims& dims, const MlaWeights& weights, DType dtype,
                       bool requantize) {
  const std::int64_t N = dims.num_heads, P = dims.qk_nope_head_dim;
  const MlaProjections p(weights);
  // FP8 weights come in f32, so that products are their only rounding.
  const DenseWeight q_b(p.q_b, DType::f32), kv_b(p.kv_b, DType::f32), o(p.o, DType::f32);
  const MlaUpProjections up = mla_up_projections(dims, kv_b, weights.kv_b_order);
  const WeightGroups* groups = requantize ? &p.q_b.scale.groups : nullptr;
  AbsorbedWeights result;

  const TensorView q_heads = static_cast<const TensorView&>(q_b).split(0, N, dims.qk_head_dim());
  // [X, N, P] by [N, P, L] -> [X, N, L]
  const Tensor q_uk =
      multiply_heads(q_heads.slice(1, 0, P).transpose(1, 2).transpose(0, 1), up.w_uk);
  result.w_q_uk = rounded("w_q_uk", q_uk.view().fuse(1).transpose(0, 1), dtype, groups);
  result.w_qr = rows_of_heads(p.q_b, N, P, dims.qk_head_dim());
  // [H, N, V] by [N, V, L] -> [H, N, L]
  const Tensor uv_o = multiply_heads(static_cast<const TensorView&>(o).split(1, N, dims.v_head_dim),
                                     up.w_uv.transpose(1, 2));
  result.w_uv_o = rounded("w_uv_o", uv_o.view().fuse(1), dtype, groups);
  return result;
}

}  // namespace fovea
