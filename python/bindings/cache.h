// Caches over memory of Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include "dlpack.h"
#include "fovea/paged_kv_cache.h"

namespace fovea::python {

/// The format of a tensor [num_blocks, block_size, row] or [num_blocks, block_size, heads, width]
/// of a compute dtype, whose elements are the values.
KvFormat plain_format_of(const TensorView& view, const char* name);

/// A tensor [num_blocks, block_size, ...] as a cache. Dimensions behind the second are one row:
/// of `format`'s dtype, or of u8 and then its bytes. Blocks and rows may lie apart.
PagedKvCache view_as_cache(const TensorView& view, const KvFormat& format, const char* name);

/// A PagedKvCache and the Python object whose memory it views, if any.
class KvCache {
 public:
  KvCache(const KvFormat& format, std::int64_t num_blocks, std::int64_t block_size);
  KvCache(nb::object storage, const KvFormat& format);

  const PagedKvCache& get() const { return cache_; }
  bool read_only() const { return storage_.read_only; }
  /// The tensor below, if any.
  nb::handle storage() const { return object_; }
  /// Copies the rows of a block; on a GPU on the current stream of the tensor's library.
  void copy_block(std::int64_t src, std::int64_t dst) const;

 private:
  nb::object object_;
  ImportedTensor storage_;
  PagedKvCache cache_;
};

void bind_cache(nb::module_& m);
void bind_block_pool(nb::module_& m);

}  // namespace fovea::python
