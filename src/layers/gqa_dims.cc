#include <cmath>

#include "core/check.h"
#include "fovea/attention.h"
#include "layers/rows.h"

namespace fovea {
GqaDims GqaDims::validated() const {
  const struct {
    const char* name;
    std::int64_t value;
    std::int64_t least;
  } fields[] = {{"hidden_size", hidden_size, 1},
                {"num_heads", num_heads, 1},
                {"num_kv_heads", num_kv_heads, 0},
                {"head_dim", head_dim, 0},
                {"v_head_dim", v_head_dim, 0}};
  for (const auto& [name, value, least] : fields) {
    FOVEA_CHECK(value >= least && value <= kMaxDim, invalid_argument,
                "dims.{} is {}, but must be in [{}, {}]", name, value, least, kMaxDim);
  }
  FOVEA_CHECK(q_scaling > 0.f && std::isfinite(q_scaling), invalid_argument,
              "dims.q_scaling is {}, but must be positive", q_scaling);
  FOVEA_CHECK(sm_scale >= 0.f && std::isfinite(sm_scale), invalid_argument,
              "dims.sm_scale is {}, but must be positive, or 0 for 1 / (sqrt(D) * q_scaling)",
              sm_scale);
  GqaDims result = *this;
  if (num_kv_heads == 0) result.num_kv_heads = num_heads;
  FOVEA_CHECK(num_heads % result.num_kv_heads == 0, invalid_argument,
              "dims.num_kv_heads is {}, but must divide num_heads = {}", num_kv_heads, num_heads);
  if (head_dim == 0) {
    FOVEA_CHECK(
        hidden_size % num_heads == 0, invalid_argument,
        "dims.head_dim is 0, but must be given: hidden_size = {} is no multiple of num_heads "
        "= {}",
        hidden_size, num_heads);
    result.head_dim = hidden_size / num_heads;
  }
  if (v_head_dim == 0) result.v_head_dim = result.head_dim;
  const auto from_dims =
      static_cast<float>(1 / (std::sqrt(static_cast<double>(result.head_dim)) * q_scaling));
  FOVEA_CHECK(sm_scale == 0.f || q_scaling == 1.f || sm_scale == from_dims, invalid_argument,
              "dims.sm_scale is {}, but only one of it and q_scaling = {} may be given", sm_scale,
              q_scaling);
  if (sm_scale == 0.f) result.sm_scale = from_dims;
  return result;
}

GqaCache GqaCache::columns_of(const PagedKvCache& cache, const GqaDims& dims) {
  FOVEA_CHECK(cache.format().row_elements == dims.k_size() + dims.v_size(), invalid_argument,
              "cache has rows of {}, but must have rows of Hk * (D + Dv) = {}",
              cache.format().row_elements, dims.k_size() + dims.v_size());
  return {.k = cache.columns(0, dims.k_size()), .v = cache.columns(dims.k_size(), dims.v_size())};
}

}  // namespace fovea
