// Operands that are rows of heads, in blocks or not.
#pragma once

#include <cstdint>

#include "fovea/paged_kv_cache.h"

namespace fovea::cuda {

/// Rows of heads: [num_blocks, block_size, heads, channels] with unit innermost stride. Rows that
/// are not paged are one block.
struct HeadRows {
  const void* data = nullptr;  ///< Null: absent.
  std::int64_t channels = 0;
  std::int64_t heads = 1;
  std::int64_t block_size = 0;
  std::int64_t num_blocks = 1;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t block_stride = 0;
};

/// Of blocks. Strides of quantised formats count bytes.
inline HeadRows head_rows(const PagedKvCache& cache, std::int64_t heads, std::int64_t channels) {
  KvFormat format = cache.format();
  format.num_heads = heads;  // Formats without scales per head need not know it.
  const bool dense = format.scales == KvScales::none;
  const std::int64_t unit = dense ? bytes_of(format.dtype, 1) : 1;
  return {.data = cache.num_blocks() > 0 ? cache.row(0, 0) : nullptr,
          .channels = channels,
          .heads = heads,
          .block_size = cache.block_size(),
          .num_blocks = cache.num_blocks(),
          .head_stride = format.head_bytes() / unit,
          .row_stride = cache.layout().row_stride / unit,
          .block_stride = cache.layout().block_stride / unit};
}

}  // namespace fovea::cuda
