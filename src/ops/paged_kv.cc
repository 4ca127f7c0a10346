#include "ops/paged_kv.h"

#include "core/check.h"

namespace fovea {

void check_same_blocks(const char* op, const PagedKvCache& k_cache, const PagedKvCache& v_cache) {
  FOVEA_CHECK(
      k_cache.num_blocks() == v_cache.num_blocks() && k_cache.block_size() == v_cache.block_size(),
      invalid_argument, "{}: v_cache has {} blocks of {} rows; it must have {} of {}, as k_cache",
      op, v_cache.num_blocks(), v_cache.block_size(), k_cache.num_blocks(), k_cache.block_size());
}

void check_paged_kv(const char* op, const PagedKv& kv, const TensorView& q, const TensorView& out) {
  const std::int64_t heads = q.shape[1];
  FOVEA_CHECK(kv.num_kv_heads > 0 && heads > 0 && heads % kv.num_kv_heads == 0, invalid_argument,
              "{}: q has N = {} heads and num_kv_heads is {}; N must be a positive multiple of it",
              op, heads, kv.num_kv_heads);
  check_heads_cache(op, kv.k_cache, kv.num_kv_heads, q.shape[2], "Hk * Dk", "k_cache");
  check_heads_cache(op, kv.v_cache, kv.num_kv_heads, out.shape[2], "Hk * Dv", "v_cache");
  check_same_blocks(op, *kv.k_cache, *kv.v_cache);
}

void check_outside_caches(const Argument& argument, const TensorView& view, const PagedKv& kv) {
  check_disjoint(argument, view, "k_cache", bytes_of_rows(*kv.k_cache));
  check_disjoint(argument, view, "v_cache", bytes_of_rows(*kv.v_cache));
}

}  // namespace fovea
