// Keys and values of one key head of a request, in blocks; new tokens' perhaps in their own views.
#pragma once

#include <limits>

#include "backends/cpu/attend.h"
#include "backends/cpu/formats/stored_heads.h"
#include "backends/cpu/paged_rows.h"
#include "backends/cpu/rows.h"

namespace fovea::cpu {

/// Keys and values that are not read from the cache though they may be in it: those from
/// `first_key` on are rows `first_row` and up of k and v.
struct NewTokens {
  const TensorView* k = nullptr;  ///< [T, Hk, Dk]; null: there are none.
  const TensorView* v = nullptr;  ///< [T, Hk, Dv]
  std::int64_t first_key = std::numeric_limits<std::int64_t>::max();
  std::int64_t first_row = 0;
};

class PagedKvRows {
 public:
  PagedKvRows(const Kernels& kernels, const PagedKv& kv, std::int64_t request, std::int64_t kv_head,
              const NewTokens& new_tokens = {})
      : kernels_(kernels),
        key_heads_(kernels, kv.k_cache->format(), kv.num_kv_heads),
        value_heads_(kernels, kv.v_cache->format(), kv.num_kv_heads),
        keys_(*kv.k_cache, kv.block_table, request),
        values_(*kv.v_cache, kv.block_table, request),
        kv_head_(kv_head),
        new_tokens_(new_tokens) {}

  void load(AttendState& state, const KeyInterval& tile) const {
    const KeyInterval stored = stored_part(tile);
    keys_.for_each(stored, [&](std::int64_t position, const std::byte* row) {
      key_heads_.load(row, kv_head_, state.key(position - tile.begin));
    });
    values_.for_each(stored, [&](std::int64_t position, const std::byte* row) {
      value_heads_.load(row, kv_head_, state.value(position - tile.begin));
    });
    for (std::int64_t position = stored.end; position < tile.end; ++position) {
      const std::int64_t row = new_tokens_.first_row + position - new_tokens_.first_key;
      load_row(kernels_, row_of(*new_tokens_.k, {row, kv_head_}), key_heads_.elements(),
               state.key(position - tile.begin));
      load_row(kernels_, row_of(*new_tokens_.v, {row, kv_head_}), value_heads_.elements(),
               state.value(position - tile.begin));
    }
  }
  void prefetch(const KeyInterval& tile) const {
    const KeyInterval stored = stored_part(tile);
    keys_.for_each(stored,
                   [&](std::int64_t, const std::byte* row) { key_heads_.prefetch(row, kv_head_); });
    values_.for_each(
        stored, [&](std::int64_t, const std::byte* row) { value_heads_.prefetch(row, kv_head_); });
  }

 private:
  KeyInterval stored_part(const KeyInterval& tile) const {
    return {tile.begin, std::clamp(new_tokens_.first_key, tile.begin, tile.end)};
  }

  const Kernels& kernels_;
  StoredHeads key_heads_;
  StoredHeads value_heads_;
  PagedRows keys_;
  PagedRows values_;
  std::int64_t kv_head_;
  NewTokens new_tokens_;
};

}  // namespace fovea::cpu
