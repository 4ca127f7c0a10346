#include "engine/host_mirror.h"

#include <set>

#include "fovea/block_pool.h"

namespace fovea::engine {

TensorView HostMirror::rows(const TensorView& rows) {
  if (rows.device == Device{}) return rows;
  const Tensor& copy = rows_.emplace_back(
      Tensor::empty(rows.dtype, std::span(rows.shape).first(static_cast<std::size_t>(rows.ndim))));
  copy_bytes(ctx_.memory, copy.view().data, rows.data, copy.nbytes(), ctx_.stream);
  return copy;
}

const PagedKvCache* HostMirror::blocks(const PagedKvCache& cache, const BlockTableView& table) {
  if (cache.device() == Device{}) return &cache;
  const PagedKvCache& copy =
      caches_.emplace_back(PagedKvCache::allocate(cache.format(), cache.layout()));
  std::set<std::int32_t> used;
  for (std::int64_t request = 0; request < table.requests; ++request) {
    const std::int32_t* row = table.data + request * table.stride;
    for (std::int64_t i = 0; i < table.width; ++i) {
      if (row[i] >= 0 && row[i] < cache.num_blocks()) used.insert(row[i]);
    }
  }
  const std::int64_t bytes = cache.layout().block_size * cache.layout().row_stride;
  for (const std::int32_t block : used) {
    copy_bytes(ctx_.memory, copy.row(block, 0), cache.row(block, 0), bytes, ctx_.stream);
  }
  return &copy;
}

}  // namespace fovea::engine
