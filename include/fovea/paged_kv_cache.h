// A pool of blocks of stored tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "fovea/kv_format.h"
#include "fovea/tensor.h"

namespace fovea {

/// Where the rows of a cache lie. All in bytes; 64-bit.
struct KvCacheLayout {
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;  ///< Tokens per block, from 1 up.
  std::int64_t row_stride = 0;  ///< Bytes from a token to the next; 0 takes format.row_bytes().
  std::int64_t block_stride =
      0;  ///< Bytes from a block to the next; 0 takes block_size * row_stride.
  std::int64_t storage_offset = 0;  ///< Bytes from the base pointer to block 0.
};

/// A pool of blocks of one format: owning, or a view of foreign memory. Copies are views of the
/// same memory. Slot s is row s % block_size of block s / block_size.
class PagedKvCache {
 public:
  PagedKvCache() = default;

  /// Owning and uninitialised. Throws Error(invalid_argument) on a bad format or layout.
  static PagedKvCache allocate(const KvFormat& format, const KvCacheLayout& layout,
                               const MemorySource& memory = {});
  /// A view of `base`, memory of `device`, which must outlive it and hold required_bytes().
  static PagedKvCache view(void* base, const KvFormat& format, const KvCacheLayout& layout,
                           Device device = {});
  /// Bytes from the base pointer to the end of the last row.
  static std::int64_t required_bytes(const KvFormat& format, const KvCacheLayout& layout);

  /// A view of elements [first_element, first_element + count) of every row: same blocks, narrower
  /// rows. Throws Error(invalid_argument) outside of a row.
  PagedKvCache columns(std::int64_t first_element, std::int64_t count) const;

  const KvFormat& format() const { return format_; }
  /// With its defaults filled in.
  const KvCacheLayout& layout() const { return layout_; }
  const Device& device() const { return device_; }
  std::int64_t num_blocks() const { return layout_.num_blocks; }
  std::int64_t block_size() const { return layout_.block_size; }
  std::int64_t num_slots() const { return layout_.num_blocks * layout_.block_size; }

  /// Bytes from block 0's first row to row `row` of block `block`. Not checked.
  std::int64_t offset(std::int64_t block, std::int64_t row) const {
    return block * layout_.block_stride + row * layout_.row_stride;
  }
  std::byte* row(std::int64_t block, std::int64_t row) const { return first_ + offset(block, row); }
  std::byte* slot(std::int64_t slot) const {
    return row(slot / layout_.block_size, slot % layout_.block_size);
  }
  /// Copies the rows of a block (copy-on-write after a fork). Throws Error(unsupported) unless they
  /// are on the host.
  void copy_block(std::int64_t src, std::int64_t dst) const;

 private:
  std::shared_ptr<std::byte> owner_;
  std::byte* first_ = nullptr;
  KvFormat format_;
  KvCacheLayout layout_;
  Device device_;
};

}  // namespace fovea
