// Rows of a paged cache, in any format, as doubles.
#pragma once

#include <cstdint>
#include <span>

#include "fovea/ops.h"
#include "fovea/workspace.h"
#include "kv/formats/format.h"

namespace fovea::reference {

/// Where key `key` of request `request` lies.
inline std::byte* cached_row(const PagedKvCache& cache, const BlockTableView& table,
                             std::int64_t request, std::int64_t key) {
  const std::int32_t* blocks = table.data + request * table.stride;
  return cache.row(blocks[key / cache.block_size()], key % cache.block_size());
}

/// Reads heads of rows of one format.
class HeadReader {
 public:
  static std::int64_t scratch(const KvFormat& format, std::int64_t num_heads) {
    return Workspace::rounded(format.row_elements / num_heads * std::int64_t{sizeof(float)});
  }
  /// The number of heads is the op's: formats without scales per head need not know it.
  HeadReader(const KvFormat& format, std::int64_t num_heads, WorkspaceScope& scope)
      : format_(format), floats_(scope.take<float>(format.row_elements / num_heads)) {
    format_.num_heads = num_heads;
  }

  /// The first `count` elements of head `head`.
  void load(const std::byte* row, std::int64_t head, std::int64_t count, double* values) const {
    const auto bytes = static_cast<std::size_t>(format_.head_bytes());
    decode_head(format_, std::span(row + head * format_.head_bytes(), bytes),
                std::span(floats_, static_cast<std::size_t>(format_.head_elements())));
    for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<double>(floats_[i]);
  }
  void load(const std::byte* row, std::int64_t head, double* values) const {
    load(row, head, format_.head_elements(), values);
  }

 private:
  KvFormat format_;
  float* floats_;
};

/// Keys and values of heads.
class PagedKvReader {
 public:
  static std::int64_t scratch(const PagedKv& kv) {
    return HeadReader::scratch(kv.k_cache->format(), kv.num_kv_heads) +
           HeadReader::scratch(kv.v_cache->format(), kv.num_kv_heads);
  }
  PagedKvReader(const PagedKv& kv, WorkspaceScope& scope)
      : kv_(kv),
        keys_(kv.k_cache->format(), kv.num_kv_heads, scope),
        values_(kv.v_cache->format(), kv.num_kv_heads, scope) {}

  void load_key(std::int64_t request, std::int64_t kv_head, std::int64_t key, double* row) const {
    keys_.load(cached_row(*kv_.k_cache, kv_.block_table, request, key), kv_head, row);
  }
  void load_value(std::int64_t request, std::int64_t kv_head, std::int64_t key, double* row) const {
    values_.load(cached_row(*kv_.v_cache, kv_.block_table, request, key), kv_head, row);
  }

 private:
  const PagedKv& kv_;
  HeadReader keys_;
  HeadReader values_;
};

}  // namespace fovea::reference
