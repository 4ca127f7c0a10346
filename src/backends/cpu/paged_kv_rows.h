// Keys and values of one key head of a request, in blocks.
#pragma once

#include "backends/cpu/attend.h"
#include "backends/cpu/paged_rows.h"

namespace fovea::cpu {

class PagedKvRows {
 public:
  PagedKvRows(const Kernels& kernels, const PagedKv& kv, std::int64_t request, std::int64_t kv_head)
      : kernels_(kernels),
        keys_(*kv.k_cache, kv.block_table, request),
        values_(*kv.v_cache, kv.block_table, request),
        key_dim_(kv.k_cache->format().row_elements / kv.num_kv_heads),
        value_dim_(kv.v_cache->format().row_elements / kv.num_kv_heads),
        kv_head_(kv_head) {}

  void load(AttendState& state, const KeyInterval& tile) const {
    keys_.for_each(tile, [&](std::int64_t position, const Row& row) {
      load_row(kernels_, key_of(row), key_dim_, state.key(position - tile.begin));
    });
    values_.for_each(tile, [&](std::int64_t position, const Row& row) {
      load_row(kernels_, value_of(row), value_dim_, state.value(position - tile.begin));
    });
  }
  void prefetch(const KeyInterval& tile) const {
    keys_.for_each(tile,
                   [&](std::int64_t, const Row& row) { prefetch_row(key_of(row), key_dim_); });
    values_.for_each(
        tile, [&](std::int64_t, const Row& row) { prefetch_row(value_of(row), value_dim_); });
  }

 private:
  Row key_of(const Row& row) const { return row.from(kv_head_ * key_dim_); }
  Row value_of(const Row& row) const { return row.from(kv_head_ * value_dim_); }

  const Kernels& kernels_;
  PagedRows keys_;
  PagedRows values_;
  std::int64_t key_dim_;
  std::int64_t value_dim_;
  std::int64_t kv_head_;
};

}  // namespace fovea::cpu
