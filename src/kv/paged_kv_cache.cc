#include "fovea/paged_kv_cache.h"

#include <cstring>

#include "core/aligned_memory.h"
#include "core/check.h"
#include "kv/formats/format.h"

namespace fovea {
namespace {

/// a * b + c of non-negative numbers, checked.
std::int64_t multiply_add(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t result = 0;
  FOVEA_CHECK(!__builtin_mul_overflow(a, b, &result) && !__builtin_add_overflow(result, c, &result),
              invalid_argument, "layout: {} * {} + {} bytes do not fit 64 bits", a, b, c);
  return result;
}

/// The layout with its defaults filled in. Throws unless rows are apart and addresses fit 64 bits.
KvCacheLayout checked(const KvFormat& format, KvCacheLayout layout) {
  check_format(format);
  const std::int64_t row_bytes = format.row_bytes();
  const std::int64_t alignment = format.alignment();
  FOVEA_CHECK(layout.num_blocks >= 0, invalid_argument,
              "layout.num_blocks is {}, but must not be negative", layout.num_blocks);
  FOVEA_CHECK(layout.block_size >= 1, invalid_argument,
              "layout.block_size is {}, but must be at least 1", layout.block_size);
  FOVEA_CHECK(layout.storage_offset >= 0 && layout.storage_offset % alignment == 0,
              invalid_argument, "layout.storage_offset is {}, but must be a multiple of {} from 0",
              layout.storage_offset, alignment);
  if (layout.row_stride == 0) layout.row_stride = row_bytes;
  FOVEA_CHECK(
      layout.row_stride >= row_bytes && layout.row_stride % alignment == 0, invalid_argument,
      "layout.row_stride is {}, but must be a multiple of {} and at least {}, a row's bytes",
      layout.row_stride, alignment, row_bytes);
  const std::int64_t rows_end = multiply_add(layout.block_size - 1, layout.row_stride, row_bytes);
  if (layout.block_stride == 0) {
    layout.block_stride = multiply_add(layout.block_size, layout.row_stride, 0);
  }
  FOVEA_CHECK(layout.block_stride >= row_bytes && layout.block_stride % alignment == 0,
              invalid_argument,
              "layout.block_stride is {}, but must be a multiple of {} and at least {}, a row's "
              "bytes",
              layout.block_stride, alignment, row_bytes);

  // Each block's rows lie before the next block's, or all blocks' rows of one number lie before
  // those of the next number.
  std::int64_t blocks_end = 0;
  if (layout.num_blocks > 0) {
    blocks_end = multiply_add(layout.num_blocks - 1, layout.block_stride, row_bytes);
  }
  FOVEA_CHECK(layout.num_blocks <= 1 || layout.block_stride >= rows_end || layout.block_size == 1 ||
                  layout.row_stride >= blocks_end,
              invalid_argument,
              "layout.block_stride is {}: with {} rows {} bytes apart, blocks would overlap below "
              "{}",
              layout.block_stride, layout.block_size, layout.row_stride, rows_end);
  multiply_add(layout.num_blocks, layout.block_size, 0);  // num_slots()
  return layout;
}

std::int64_t end_of_last_row(const KvFormat& format, const KvCacheLayout& layout) {
  if (layout.num_blocks == 0) return layout.storage_offset;
  const std::int64_t last_block =
      multiply_add(layout.num_blocks - 1, layout.block_stride, layout.storage_offset);
  const std::int64_t last_row = multiply_add(layout.block_size - 1, layout.row_stride, last_block);
  return multiply_add(1, format.row_bytes(), last_row);
}

}  // namespace

std::int64_t PagedKvCache::required_bytes(const KvFormat& format, const KvCacheLayout& layout) {
  return end_of_last_row(format, checked(format, layout));
}

PagedKvCache PagedKvCache::allocate(const KvFormat& format, const KvCacheLayout& layout,
                                    const MemorySource& memory) {
  const std::int64_t bytes = required_bytes(format, layout);
  std::shared_ptr<std::byte> owner(fovea::allocate(memory, bytes, "PagedKvCache"),
                                   [memory](std::byte* rows) { release(memory, rows); });
  PagedKvCache cache = view(owner.get(), format, layout, memory.device);
  cache.owner_ = std::move(owner);
  return cache;
}

PagedKvCache PagedKvCache::view(void* base, const KvFormat& format, const KvCacheLayout& layout,
                                Device device) {
  PagedKvCache cache;
  cache.device_ = device;
  cache.format_ = format;
  cache.layout_ = checked(format, layout);
  end_of_last_row(format, cache.layout_);
  FOVEA_CHECK(base != nullptr || cache.layout_.num_blocks == 0, invalid_argument,
              "base is null, but must hold {} blocks", cache.layout_.num_blocks);
  const std::int64_t alignment = format.alignment();
  FOVEA_CHECK(reinterpret_cast<std::uintptr_t>(base) % static_cast<std::uintptr_t>(alignment) == 0,
              invalid_argument, "base must be aligned to {} bytes for {}", alignment,
              format.name());
  if (base != nullptr) cache.first_ = static_cast<std::byte*>(base) + cache.layout_.storage_offset;
  return cache;
}

PagedKvCache PagedKvCache::columns(std::int64_t first_element, std::int64_t count) const {
  FOVEA_CHECK(first_element >= 0 && count >= 1 && count <= format_.row_elements - first_element,
              invalid_argument,
              "the columns are [{}, {} + {}), but must be elements of a row of {}, at least one",
              first_element, first_element, count, format_.row_elements);
  FOVEA_CHECK(format_.scales == KvScales::none, unsupported,
              "the format is {}, but must be f32, f16 or bf16: its rows are no columns of elements",
              format_.name());
  PagedKvCache cache = *this;
  const std::int64_t offset = bytes_of(format_.dtype, first_element);
  cache.format_.row_elements = count;
  cache.layout_.storage_offset += offset;
  if (cache.first_ != nullptr) cache.first_ += offset;
  return cache;
}

void PagedKvCache::copy_block(std::int64_t src, std::int64_t dst) const {
  FOVEA_CHECK(src >= 0 && src < num_blocks() && dst >= 0 && dst < num_blocks(), invalid_argument,
              "the copy is from block {} to block {}, but both must be in [0, {})", src, dst,
              num_blocks());
  FOVEA_CHECK(device_.type == Device::Type::cpu, unsupported,
              "the cache is on CUDA device {}, but only blocks on the host are copied here",
              device_.index);
  if (src == dst) return;
  // Row by row: what lies between them is not this cache's.
  const auto bytes = static_cast<std::size_t>(format_.row_bytes());
  for (std::int64_t r = 0; r < block_size(); ++r) std::memcpy(row(dst, r), row(src, r), bytes);
}

}  // namespace fovea
