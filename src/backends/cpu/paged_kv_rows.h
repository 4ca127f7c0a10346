// Keys and values of one key head of a request, in blocks; new tokens' perhaps in their own views.
#pragma once

#include <limits>

#include "backends/cpu/float_state.h"
#include "backends/cpu/formats/stored_heads.h"
#include "backends/cpu/formats/stored_pairs.h"
#include "backends/cpu/paged_rows.h"
#include "backends/cpu/pair_state.h"
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
        kv_(kv),
        keys_(*kv.k_cache, kv.block_table, request),
        values_(*kv.v_cache, kv.block_table, request),
        kv_head_(kv_head),
        new_tokens_(new_tokens) {}

  /// Whether the stored heads can be read into a PairState.
  static bool takes_pairs(const Kernels& kernels, const PagedKv& kv, std::int64_t qk_channels,
                          std::int64_t v_channels) {
    return qk_channels % 2 == 0 && StoredPairs::takes(kernels, kv.k_cache->format(), 0) &&
           StoredPairs::takes(kernels, kv.v_cache->format(), v_channels);
  }

  /// Whether they can be read into an InPlaceState.
  static bool takes_in_place(const PagedKv& kv) {
    return InPlaceRows::takes(kv.k_cache->format()) && InPlaceRows::takes(kv.v_cache->format());
  }

  void load(FloatState& state, const KeyInterval& tile, const KeyInterval& next) const {
    const StoredHeads key_heads(kernels_, kv_.k_cache->format(), kv_.num_kv_heads);
    const StoredHeads value_heads(kernels_, kv_.v_cache->format(), kv_.num_kv_heads);
    const KeyInterval stored = stored_part(tile);
    keys_.for_each(stored, [&](std::int64_t position, const std::byte* row) {
      key_heads.load(row, kv_head_, state.key(position - tile.begin));
    });
    values_.for_each(stored, [&](std::int64_t position, const std::byte* row) {
      value_heads.load(row, kv_head_, state.value(position - tile.begin));
    });
    for (std::int64_t position = stored.end; position < tile.end; ++position) {
      load_row(kernels_, new_key(position), new_tokens_.k->shape[2],
               state.key(position - tile.begin));
      load_row(kernels_, new_value(position), new_tokens_.v->shape[2],
               state.value(position - tile.begin));
    }
    keys_.for_each(stored_part(next), [&](std::int64_t, const std::byte* row) {
      key_heads.prefetch(row, kv_head_);
    });
    values_.for_each(stored_part(next), [&](std::int64_t, const std::byte* row) {
      value_heads.prefetch(row, kv_head_);
    });
  }

  void load(PairState& state, const KeyInterval& tile, const KeyInterval& next) const {
    const StoredPairs key_heads(kernels_, kv_.k_cache->format(), kv_.num_kv_heads);
    const StoredPairs value_heads(kernels_, kv_.v_cache->format(), kv_.num_kv_heads);
    const KeyInterval stored = stored_part(tile);
    float scales[ChannelGroups::kMax];
    keys_.for_each(stored, [&](std::int64_t position, const std::byte* row) {
      const std::int64_t i = position - tile.begin;
      const std::byte* codes =
          state.int8_keys() ? key_heads.load_int16(row, kv_head_, state.key_copy(i), scales)
                            : key_heads.load(row, kv_head_, state.key_copy(i), scales);
      state.set_key(i, codes, scales);
    });
    values_.for_each(stored, [&](std::int64_t position, const std::byte* row) {
      const std::int64_t i = position - tile.begin;
      const std::byte* codes = value_heads.load(row, kv_head_, state.value_copy(i), scales);
      state.set_value(i, codes, scales);
    });
    // New tokens are not quantised: their scales are 1 in every group.
    std::fill_n(scales, ChannelGroups::kMax, 1.f);
    for (std::int64_t position = stored.end; position < tile.end; ++position) {
      state.set_key(position - tile.begin, new_key(position).data, scales);
      state.set_value(position - tile.begin, new_value(position).data, scales);
    }
    const KeyInterval soon = stored_part(next);
    keys_.for_each(soon, [&](std::int64_t position, const std::byte* row) {
      state.set_next_key(position - next.begin, key_heads.head_of(row, kv_head_));
    });
    values_.for_each(soon, [&](std::int64_t position, const std::byte* row) {
      state.set_next_value(position - next.begin, value_heads.head_of(row, kv_head_));
    });
    state.finish_load(tile.size(), soon.size());
  }

  /// Of decode, whose tokens are all in the cache. All heads of the state, from this one on.
  void load(InPlaceState& state, const KeyInterval& tile, const KeyInterval& next) const {
    load_keys_in_place(keys_, format_of(*kv_.k_cache), kv_head_, tile, next, state);
    load_in_place(values_, format_of(*kv_.v_cache), kv_head_, tile, state.values());
  }

 private:
  /// Formats without scales per head need not know their heads.
  KvFormat format_of(const PagedKvCache& cache) const {
    KvFormat format = cache.format();
    format.num_heads = kv_.num_kv_heads;
    return format;
  }
  KeyInterval stored_part(const KeyInterval& tile) const {
    return {tile.begin, std::clamp(new_tokens_.first_key, tile.begin, tile.end)};
  }
  Row new_key(std::int64_t position) const {
    return row_of(*new_tokens_.k, {new_row(position), kv_head_});
  }
  Row new_value(std::int64_t position) const {
    return row_of(*new_tokens_.v, {new_row(position), kv_head_});
  }
  std::int64_t new_row(std::int64_t position) const {
    return new_tokens_.first_row + position - new_tokens_.first_key;
  }

  const Kernels& kernels_;
  const PagedKv& kv_;
  PagedRows keys_;
  PagedRows values_;
  std::int64_t kv_head_;
  NewTokens new_tokens_;
};

}  // namespace fovea::cpu
