#include "layers/absorbed_heads.h"

#include <utility>

#include "core/check.h"

namespace fovea {
namespace {

/// Heads [N, out, in] of any strides as one matrix [N * out, in] in f32.
Tensor stacked(const TensorView& heads) {
  Tensor matrix = Tensor::empty(DType::f32, {heads.shape[0] * heads.shape[1], heads.shape[2]});
  copy(heads, matrix.view().split(0, heads.shape[0], heads.shape[1]));
  return matrix;
}

void check_multiple(const char* name, std::int64_t dim, std::int64_t block) {
  FOVEA_CHECK(dim % block == 0, invalid_argument,
              "absorbed_products are fp8_blocks, but {} is {}, and must be a multiple of {}, the "
              "extent of kv_b_proj's blocks",
              name, dim, block);
}

}  // namespace

AbsorbedHeads::AbsorbedHeads(AbsorbedProducts products, const MlaDims& dims,
                             const Projection& kv_b_proj, KvBOrder order) {
  if (products == AbsorbedProducts::fp8_blocks) {
    take_blocks(dims, kv_b_proj, order);
  } else {
    round(products, dims, kv_b_proj, order);
  }
}

/// Blocks of kv_b_proj [N * (P + V), L] belong to one head and one of its two parts. W_UK's turn
/// with its codes.
void AbsorbedHeads::take_blocks(const MlaDims& dims, const Projection& kv_b, KvBOrder order) {
  const std::int64_t P = dims.qk_nope_head_dim, V = dims.v_head_dim, L = dims.kv_lora_rank;
  const WeightGroups groups = kv_b.scale.groups;
  FOVEA_CHECK(kv_b.is_quantized() && groups.out > 0 && groups.in > 0, invalid_argument,
              "absorbed_products are fp8_blocks, but kv_b_proj is {} in groups of [{}, {}], and "
              "must be f8e4m3fn in blocks",
              name_of(kv_b.weight.dtype), groups.out, groups.in);
  check_multiple("qk_nope_head_dim", P, groups.out);
  check_multiple("v_head_dim", V, groups.out);
  check_multiple("kv_lora_rank", L, groups.in);
  for (std::int64_t n = 0; n < dims.num_heads; ++n) {
    const bool per_head = order == KvBOrder::per_head;
    const std::int64_t k = per_head ? n * (P + V) : n * P;
    const std::int64_t v = per_head ? k + P : dims.num_heads * P + n * V;
    const auto rows = [&](const TensorView& matrix, std::int64_t begin, std::int64_t count,
                          std::int64_t unit) {
      return matrix.slice(0, begin / unit, (begin + count) / unit);
    };
    Tensor turned = Tensor::empty(DType::f8e4m3fn, {L, P});
    copy(rows(kv_b.weight, k, P, 1).transpose(0, 1), turned);
    w_uk_.push_back({turned,
                     rows(kv_b.scale.scale, k, P, groups.out).transpose(0, 1),
                     {.out = groups.in, .in = groups.out}});
    memory_.push_back(std::move(turned));
    w_uv_.push_back(
        {rows(kv_b.weight, v, V, 1), rows(kv_b.scale.scale, v, V, groups.out), groups});
  }
}

void AbsorbedHeads::round(AbsorbedProducts products, const MlaDims& dims, const Projection& kv_b,
                          KvBOrder order) {
  // FP8 weights come in f32, so that this is their only rounding.
  const DenseWeight dense(kv_b, DType::f32);
  const MlaUpProjections up = mla_up_projections(dims, dense, order);
  const auto add = [&](const TensorView& of_heads, std::vector<QuantizedWeight>& heads) {
    const Tensor matrix = stacked(of_heads);
    OwnedQuantizedWeight weight = products == AbsorbedProducts::mxfp4
                                      ? quantize_weight_mxfp4(matrix)
                                      : quantize_weight(matrix, {});
    const std::int64_t rows = of_heads.shape[1];
    for (std::int64_t n = 0; n < dims.num_heads; ++n) {
      const auto of_head = [&](const TensorView& view) {
        return view.shape[0] == 1 ? view : view.slice(0, n * rows, (n + 1) * rows);
      };
      heads.push_back({of_head(weight.codes), of_head(weight.scale), weight.groups});
    }
    memory_.push_back(std::move(weight.codes));
    memory_.push_back(std::move(weight.scale));
  };
  add(up.w_uk.transpose(1, 2), w_uk_);
  add(up.w_uv.transpose(1, 2), w_uv_);
}

}  // namespace fovea
