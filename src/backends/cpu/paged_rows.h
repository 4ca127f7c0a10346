// The rows of one request in a paged cache: the only place that sees block tables and block sizes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cpu/in_place_state.h"
#include "fovea/ops.h"
#include "variants/visibility.h"

namespace fovea::cpu {

class PagedRows {
 public:
  PagedRows(const PagedKvCache& cache, const BlockTableView& table, std::int64_t request)
      : cache_(cache), blocks_(table.data + request * table.stride) {}

  /// Calls fn(position, pointer to the row) for `positions` in order. Nothing else is read.
  template <class F>
  void for_each(const KeyInterval& positions, F&& fn) const {
    const std::int64_t block_size = cache_.block_size();
    for (std::int64_t position = positions.begin; position < positions.end;) {
      const std::int64_t column = position / block_size;
      const std::int64_t first = position - column * block_size;
      const std::int64_t count = std::min(block_size - first, positions.end - position);
      for (std::int64_t i = 0; i < count; ++i) {
        fn(position + i, cache_.row(blocks_[column], first + i));
      }
      position += count;
    }
  }

 private:
  const PagedKvCache& cache_;
  const std::int32_t* blocks_;
};

/// Heads from `first_head` on of `tile`. `format` knows its heads.
inline void load_in_place(const PagedRows& rows, const KvFormat& format, std::int64_t first_head,
                          const KeyInterval& tile, InPlaceRows& to) {
  const std::int64_t offset = first_head * format.head_bytes();
  rows.for_each(tile, [&](std::int64_t position, const std::byte* row) {
    to.set_row(position - tile.begin, row + offset);
  });
  to.finish_load(format, tile.size());
}

/// The same of keys, and those of the tile that comes next.
inline void load_keys_in_place(const PagedRows& rows, const KvFormat& format,
                               std::int64_t first_head, const KeyInterval& tile,
                               const KeyInterval& next, InPlaceState& state) {
  load_in_place(rows, format, first_head, tile, state.keys());
  const std::int64_t offset = first_head * format.head_bytes();
  rows.for_each(next, [&](std::int64_t position, const std::byte* row) {
    state.set_next_key(position - next.begin, row + offset);
  });
  state.set_num_next_keys(next.size());
}

}  // namespace fovea::cpu
