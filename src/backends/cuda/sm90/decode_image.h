// What decode kernels of this chip get of a plan: lengths and block table, as device memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cuda/upload.h"
#include "fovea/ops.h"

namespace fovea::cuda::sm90 {

class DecodeImage {
 public:
  DecodeImage(const DecodeSchedule& schedule, std::int64_t block_size)
      : schedule_(schedule), block_size_(block_size) {
    for (const std::int32_t seq_len : schedule.seq_lens) longest_ = std::max(longest_, seq_len);
    table_width_ = (longest_ + block_size - 1) / block_size;
  }

  std::int32_t num_requests() const {
    return static_cast<std::int32_t>(schedule_.seq_lens.size());
  }
  std::int32_t longest() const { return longest_; }  ///< Keys of a request at most.
  std::int64_t words() const {
    return 1 + std::int64_t{num_requests()} * (2 + table_width_);
  }

  /// Sends it, and tells `operands` where.
  template <class Operands>
  void send(const BlockTableView& table, Upload& image, Operands& operands) const {
    operands.query_start_loc = image.next();
    for (const std::int32_t first : schedule_.query_start_loc) image.put(first);
    operands.seq_lens = image.next();
    for (const std::int32_t seq_len : schedule_.seq_lens) image.put(seq_len);
    operands.block_table = image.next();
    operands.block_table_stride = table_width_;
    for (std::int32_t r = 0; r < num_requests(); ++r) {
      const std::int32_t* blocks = table.data + r * table.stride;
      for (std::int64_t b = 0; b < table_width_; ++b) {
        // What no key needs may hold anything, or not be there.
        const bool used =
            b * block_size_ < schedule_.seq_lens[static_cast<std::size_t>(r)] && b < table.width;
        image.put(used ? blocks[b] : 0);
      }
    }
    image.send();
  }

 private:
  const DecodeSchedule& schedule_;
  std::int64_t block_size_;
  std::int32_t longest_ = 0;
  std::int64_t table_width_ = 0;  ///< Blocks of a request at most.
};

/// Pieces of a workspace that kernels want at multiples of 256 bytes.
struct AlignedScratch {
  static constexpr std::int64_t kAlignment = 256;
  static std::int64_t bytes(std::int64_t needed) {
    return Workspace::rounded(needed + kAlignment);
  }
  static void* take(WorkspaceScope& scope, std::int64_t needed) {
    const auto taken = reinterpret_cast<std::uintptr_t>(scope.take_bytes(needed + kAlignment));
    return reinterpret_cast<void*>((taken + kAlignment - 1) / kAlignment * kAlignment);
  }
};

}  // namespace fovea::cuda::sm90
