// What decode kernels of this chip get of a plan: lengths and block table, as device memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cuda/index_checks.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/upload.h"
#include "fovea/ops.h"

namespace fovea::cuda::sm90 {

/// The scratch of a call: the draft tree, query_start_loc, seq_lens, the block table; behind them
/// what the kernels plan and work in.
class DecodeImage {
 public:
  DecodeImage(const DecodeSchedule& schedule, const PagedKvCache& cache)
      : schedule_(schedule), cache_(cache) {
    for (const std::int32_t seq_len : schedule.seq_lens) longest_ = std::max(longest_, seq_len);
    table_width_ = (longest_ + cache.block_size() - 1) / cache.block_size();
  }

  std::int32_t longest() const { return longest_; }  ///< Keys of a request at most.
  /// With `kernel_bytes` for the kernels.
  std::int64_t bytes(std::int64_t kernel_bytes) const {
    return image_bytes() + Workspace::rounded(kernel_bytes + kAlignment);
  }
  /// The kernels' part of such scratch.
  void* kernel_memory(std::byte* scratch) const {
    const auto behind = reinterpret_cast<std::uintptr_t>(scratch + image_bytes());
    return reinterpret_cast<void*>((behind + kAlignment - 1) / kAlignment * kAlignment);
  }

  /// Sends what the device does not have.
  void send(const OpContext& ctx, const BlockTableView& table, const AttentionVariant& variant,
            std::byte* scratch) const {
    auto* const words = reinterpret_cast<std::int32_t*>(scratch);
    Upload image(words, stream_of(ctx));
    for (const std::uint64_t entry : schedule_.draft_tree) image.put(entry);
    for (const std::int32_t first : schedule_.query_start_loc) image.put(first);
    if (schedule_.device_seq_lens == nullptr) put_requests(table, image);
    image.send();
    if (schedule_.device_seq_lens && ctx.device_fault) {
      check_lengths(ctx, schedule_, table, cache_, variant,
                    words + tree_words() + num_requests() + 1);
    }
  }
  /// Tells `operands` where all that is.
  template <class Operands>
  void find(const OpContext& ctx, const BlockTableView& table, const std::byte* scratch,
            Operands& operands) const {
    if (!schedule_.draft_tree.empty()) {
      operands.draft_tree = reinterpret_cast<const std::uint64_t*>(scratch);
    }
    operands.query_start_loc = reinterpret_cast<const std::int32_t*>(scratch) + tree_words();
    operands.seq_lens = operands.query_start_loc + num_requests() + 1;
    operands.block_table = operands.seq_lens + num_requests();
    operands.block_table_stride = table_width_;
    if (schedule_.device_seq_lens == nullptr) return;
    if (ctx.device_fault == nullptr) operands.seq_lens = schedule_.device_seq_lens;
    operands.block_table = table.data;
    operands.block_table_stride = table.stride;
  }

 private:
  static constexpr std::int64_t kAlignment = 256;

  std::int64_t num_requests() const { return std::ssize(schedule_.seq_lens); }
  std::int64_t tree_words() const { return 2 * std::ssize(schedule_.draft_tree); }
  std::int64_t image_bytes() const {
    // As many words for a request as `plain` has: layers size their workspace before they see the
    // cache, which may be one that only `plain` takes.
    const std::int64_t words = tree_words() + 1 + num_requests() * (7 + table_width_);
    return Workspace::rounded(words * std::int64_t{sizeof(std::int32_t)});
  }
  void put_requests(const BlockTableView& table, Upload& image) const {
    for (const std::int32_t seq_len : schedule_.seq_lens) image.put(seq_len);
    for (std::int64_t r = 0; r < num_requests(); ++r) {
      const std::int32_t* blocks = table.data + r * table.stride;
      for (std::int64_t b = 0; b < table_width_; ++b) {
        // What no key needs may hold anything, or not be there.
        const bool used =
            b * cache_.block_size() < schedule_.seq_lens[static_cast<std::size_t>(r)] &&
            b < table.width;
        image.put(used ? blocks[b] : 0);
      }
    }
  }

  const DecodeSchedule& schedule_;
  const PagedKvCache& cache_;
  std::int32_t longest_ = 0;
  std::int64_t table_width_ = 0;  ///< Blocks of a request at most.
};

}  // namespace fovea::cuda::sm90
