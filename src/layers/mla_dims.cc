#include <cmath>

#include "core/check.h"
#include "fovea/mla.h"
#include "layers/rows.h"

namespace fovea {
MlaDims MlaDims::validated() const {
  const struct {
    const char* name;
    std::int64_t value;
    std::int64_t least;
  } fields[] = {{"hidden_size", hidden_size, 1},
                {"num_heads", num_heads, 1},
                {"q_lora_rank", q_lora_rank, 0},
                {"kv_lora_rank", kv_lora_rank, 1},
                {"qk_nope_head_dim", qk_nope_head_dim, 1},
                {"qk_rope_head_dim", qk_rope_head_dim, 1},
                {"v_head_dim", v_head_dim, 1}};
  for (const auto& [name, value, least] : fields) {
    FOVEA_CHECK(value >= least && value <= kMaxDim, invalid_argument,
                "dims.{} is {}, but must be in [{}, {}]", name, value, least, kMaxDim);
  }
  FOVEA_CHECK(qk_rope_head_dim % 2 == 0, invalid_argument,
              "dims.qk_rope_head_dim is {}, but must be even, as channels turn in pairs",
              qk_rope_head_dim);
  FOVEA_CHECK(sm_scale >= 0.f && std::isfinite(sm_scale), invalid_argument,
              "dims.sm_scale is {}, but must be positive, or 0 for (P + R)^-0.5", sm_scale);
  MlaDims result = *this;
  if (result.sm_scale == 0.f) {
    result.sm_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(qk_head_dim())));
  }
  return result;
}

MlaUpProjections mla_up_projections(const MlaDims& dims, const TensorView& kv_b_proj,
                                    KvBOrder order) {
  const std::int64_t N = dims.num_heads, L = dims.kv_lora_rank, P = dims.qk_nope_head_dim,
                     V = dims.v_head_dim;
  FOVEA_CHECK(kv_b_proj && kv_b_proj.ndim == 2 && kv_b_proj.shape[0] == N * (P + V) &&
                  kv_b_proj.shape[1] == L,
              invalid_argument,
              "kv_b_proj is {}, but must be [num_heads * (qk_nope_head_dim + v_head_dim), "
              "kv_lora_rank] = [{} * ({} + {}), {}] = [{}, {}]",
              to_string(kv_b_proj), N, P, V, L, N * (P + V), L);
  TensorView keys, values;  // [N, P, L] and [N, V, L]
  if (order == KvBOrder::per_head) {
    const TensorView heads = kv_b_proj.split(0, N, P + V);
    keys = heads.slice(1, 0, P);
    values = heads.slice(1, P, P + V);
  } else {
    keys = kv_b_proj.slice(0, 0, N * P).split(0, N, P);
    values = kv_b_proj.slice(0, N * P, N * (P + V)).split(0, N, V);
  }
  return {.w_uk = keys, .w_uv = values.transpose(1, 2)};
}

}  // namespace fovea
