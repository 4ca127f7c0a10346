#include "layers/absorbed_weights.h"

namespace fovea {
namespace {

/// out[t, n] = x[t, n] weight[n], all in f32: results are rounded to the weights' dtype once.
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

}  // namespace

QueryProjections query_projections(const MlaDims& dims, const TensorView& q_b_proj) {
  const TensorView heads = q_b_proj.split(0, dims.num_heads, dims.qk_head_dim());
  return {heads.slice(1, 0, dims.qk_nope_head_dim),
          heads.slice(1, dims.qk_nope_head_dim, dims.qk_head_dim())};
}

Tensor absorb_query_projection(const MlaDims& dims, const TensorView& q_b_proj,
                               const TensorView& w_uk) {
  const TensorView nope = query_projections(dims, q_b_proj).nope;  // [N, P, X]
  // [X, N, P] by [N, P, L] -> [X, N, L]
  const Tensor product = multiply_heads(nope.transpose(1, 2).transpose(0, 1), w_uk);
  Tensor result =
      Tensor::empty(q_b_proj.dtype, {dims.num_heads * dims.kv_lora_rank, q_b_proj.shape[1]});
  copy(product.view().fuse(1).transpose(0, 1), result);
  return result;
}

Tensor rope_query_projection(const MlaDims& dims, const TensorView& q_b_proj) {
  const std::int64_t N = dims.num_heads, R = dims.qk_rope_head_dim;
  Tensor result = Tensor::empty(q_b_proj.dtype, {N * R, q_b_proj.shape[1]});
  copy(query_projections(dims, q_b_proj).rope, result.view().split(0, N, R));
  return result;
}

Tensor absorb_output_projection(const MlaDims& dims, const TensorView& o_proj,
                                const TensorView& w_uv) {
  // [H, N, V] by [N, V, L] -> [H, N, L]
  const Tensor product =
      multiply_heads(o_proj.split(1, dims.num_heads, dims.v_head_dim), w_uv.transpose(1, 2));
  Tensor result =
      Tensor::empty(o_proj.dtype, {dims.hidden_size, dims.num_heads * dims.kv_lora_rank});
  copy(product.view().fuse(1), result);
  return result;
}

}  // namespace fovea
