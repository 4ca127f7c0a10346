// Rows of requests in a paged cache where every byte that nobody owns is NaN, and every block id
// that nobody needs is garbage.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>
#include <span>
#include <vector>

#include "fovea/attention_variant.h"
#include "fovea/ops.h"
#include "fovea/paged_kv_cache.h"
#include "support/poison.h"

namespace fovea::test {

inline std::vector<std::int32_t> offsets_of(const std::vector<std::int32_t>& lens) {
  std::vector<std::int32_t> offsets{0};
  for (std::int32_t len : lens) offsets.push_back(offsets.back() + len);
  return offsets;
}

/// Query tokens of a request, and its keys. `tree`: of its draft tokens, or empty.
struct RequestRows {
  std::int64_t num_queries = 0;
  std::int64_t num_keys = 0;
  std::span<const std::uint64_t> tree = {};

  /// Of request r; `draft_tree` is empty or that of all query tokens.
  static RequestRows of(std::size_t r, const std::vector<std::int32_t>& query_start_loc,
                        const std::vector<std::int32_t>& seq_lens,
                        const std::vector<std::uint64_t>& draft_tree) {
    RequestRows rows{query_start_loc[r + 1] - query_start_loc[r], seq_lens[r], {}};
    if (!draft_tree.empty()) {
      rows.tree = std::span(draft_tree)
                      .subspan(static_cast<std::size_t>(query_start_loc[r]),
                               static_cast<std::size_t>(rows.num_queries));
    }
    return rows;
  }

  std::int64_t position(std::int64_t query) const {
    const std::int64_t context = num_keys - num_queries;
    if (tree.empty()) return context + query;
    return context + std::popcount(tree[static_cast<std::size_t>(query)]) - 1;
  }

  /// The first key that any of its queries sees; num_keys without query tokens.
  std::int64_t first_key(const AttentionVariant& variant) const {
    std::int64_t first = num_keys;
    for (std::int64_t q = 0; q < num_queries; ++q) {
      const std::int64_t p = position(q);
      std::int64_t of_query = variant.window_left < 0 ? 0 : p - variant.window_left;
      if (variant.attention_chunk > 0) {
        of_query = std::max(of_query, p - p % variant.attention_chunk);
      }
      first = std::min(first, std::max<std::int64_t>(of_query, 0));
    }
    return first;
  }
};

/// Keys [begin, end) of a request have blocks and values.
struct OwnedKeys {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

class PagedRows {
 public:
  struct Options {
    KvFormat format;
    std::int64_t block_size = 16;
    std::int64_t block_gap_bytes = 96;  ///< NaN bytes between blocks.
    std::uint64_t seed = 1;
  };

  PagedRows(const Options& options, std::span<const OwnedKeys> requests)
      : block_size_(options.block_size) {
    std::int64_t needed = 0;
    for (const OwnedKeys& keys : requests) {
      const std::int64_t end = blocks_before(keys.end);
      needed += keys.begin < keys.end ? end - keys.begin / block_size_ : 0;
      table_width_ = std::max(table_width_, end + 2);
    }
    KvCacheLayout layout;
    layout.num_blocks = needed + 3;
    layout.block_size = block_size_;
    layout.row_stride = options.format.row_bytes();
    layout.block_stride = block_size_ * layout.row_stride + options.block_gap_bytes;
    layout.storage_offset = 64;
    const std::int64_t bytes = PagedKvCache::required_bytes(options.format, layout);
    memory_ = Tensor::empty(DType::u8, {bytes});
    poison_bytes(memory_.view().data, bytes);
    cache_ = PagedKvCache::view(memory_.view().data, options.format, layout);
    deal_blocks(requests, options.seed);
  }

  const PagedKvCache& cache() const { return cache_; }
  BlockTableView table() const {
    return {table_.data(), static_cast<std::int64_t>(table_.size()) / table_width_, table_width_,
            table_width_};
  }

  /// Slot of an owned key.
  std::int64_t slot(std::int64_t request, std::int64_t key) const {
    const std::int32_t block =
        table_[static_cast<std::size_t>(request * table_width_ + key / block_size_)];
    return block * block_size_ + key % block_size_;
  }
  TensorView row(std::int64_t request, std::int64_t key) const {
    return TensorView::contiguous(cache_.slot(slot(request, key)), cache_.format().dtype,
                                  {cache_.format().row_elements});
  }

 private:
  std::int64_t blocks_before(std::int64_t end) const {
    return (end + block_size_ - 1) / block_size_;
  }

  /// A random permutation; entries that no owned key lies in are ids that exist nowhere.
  void deal_blocks(std::span<const OwnedKeys> requests, std::uint64_t seed) {
    std::vector<std::int32_t> blocks(static_cast<std::size_t>(cache_.num_blocks()));
    std::iota(blocks.begin(), blocks.end(), 0);
    for (std::size_t i = blocks.size(); i > 1; --i) {
      std::swap(
          blocks[i - 1],
          blocks[static_cast<std::size_t>(random_below(seed, i, static_cast<std::int64_t>(i)))]);
    }
    table_.assign(requests.size() * static_cast<std::size_t>(table_width_), 0x7fffff00);
    std::size_t next = 0;
    for (std::size_t r = 0; r < requests.size(); ++r) {
      const auto [begin, end] = requests[r];
      if (begin >= end) continue;
      for (std::int64_t b = begin / block_size_; b < blocks_before(end); ++b) {
        table_[r * static_cast<std::size_t>(table_width_) + static_cast<std::size_t>(b)] =
            blocks[next++];
      }
    }
  }

  std::int64_t block_size_;
  std::int64_t table_width_ = 2;  ///< Two columns behind what the longest request needs.
  Tensor memory_;
  PagedKvCache cache_;
  std::vector<std::int32_t> table_;
};

}  // namespace fovea::test
