// Slices of keys and values on their way to shared memory. Each warp loads what it computes with,
// some slices ahead, across jobs.
#pragma once

#include "backends/cuda/sm90/attention_decode/block.cuh"

namespace fovea::cuda::decode {

template <typename W>
class Loader {
 public:
  __device__ Loader(const KernelParams& k, Slice<W> (&ring)[W::kStages])
      : k_(k),
        ring_(ring),
        walk_(k.shape, k.ranges, k.group(), k.op.query_start_loc, k.op.seq_lens) {
    more_ = walk_.next(share_);
    locate();
  }

  /// Issues the next slice, or none after the last, to ring[stage]: a group of copies either way.
  __device__ __forceinline__ void issue(int stage) {
    if (more_) {
      copy(stage);
      if (++tile_ == share_.tiles) {
        tile_ = 0;
        more_ = walk_.next(share_);
      }
      locate();
    }
    ptx::commit_pieces();
  }

 private:
  /// Asks for the block of this lane's key in the next slice: it is here by the next issue.
  __device__ __forceinline__ void locate() {
    if (!more_) return;
    const std::int32_t key =
        (share_.first_tile + tile_) * kKeyTile + threadIdx.x / 32 * kKeys + threadIdx.x % kKeys;
    needed_ = key >= k_.shape.first_key(share_.seq_len, share_.query_len) && key < share_.seq_len;
    const auto block_size = static_cast<std::uint32_t>(k_.op.k_cache.block_size);
    const std::uint32_t block = static_cast<std::uint32_t>(key) / block_size;
    row_ = key - block * block_size;
    block_ = needed_
                 ? __ldg(k_.op.block_table + share_.request * k_.op.block_table_stride + block)
                 : 0;
  }

  /// Keys that no query token sees are not read; they come out as zeros.
  __device__ __forceinline__ void copy(int stage) {
    using Heads = typename W::Heads;
    constexpr int kPieces = W::kHeadBytes / Heads::kCopy;
    constexpr std::int64_t kUnit = Heads::kQuantized ? 1 : 2;  // Of strides.
    const int lane = threadIdx.x % 32;
    const auto offset_of = [&](const HeadRows& rows) {
      return (block_ * rows.block_stride + row_ * rows.row_stride +
              k_.kv_head() * rows.head_stride) *
             kUnit;
    };
    const std::int64_t k_offset = offset_of(k_.op.k_cache), v_offset = offset_of(k_.op.v_cache);
    const auto* keys = static_cast<const std::uint8_t*>(k_.op.k_cache.data);
    const auto* values = static_cast<const std::uint8_t*>(k_.op.v_cache.data);
    const std::uint32_t k_to = ptx::shared_address(ring_[stage].k);
    const std::uint32_t v_to = ptx::shared_address(ring_[stage].v);
    // Of the widest heads' odd pieces copies would take registers from the outputs.
    constexpr int kTogether = Heads::kQuantized && W::kDim > 128 ? 4 : 16;
#pragma unroll kTogether
    for (int i = 0; i < (kKeys * kPieces + 31) / 32; ++i) {
      const int index = i * 32 + lane, row = index / kPieces, piece = index % kPieces;
      const std::int64_t k_at = __shfl_sync(~0u, k_offset, row) + piece * Heads::kCopy;
      const std::int64_t v_at = __shfl_sync(~0u, v_offset, row) + piece * Heads::kCopy;
      const bool needed = __shfl_sync(~0u, needed_, row);
      if constexpr (Heads::kQuantized) {
        if (row >= kKeys) continue;
        const std::uint32_t to = row * W::kRowBytes + piece * Heads::kCopy;
        if constexpr (Heads::kCopy == 8) {
          ptx::copy_half_piece(k_to + to, keys + k_at, needed);
          ptx::copy_half_piece(v_to + to, values + v_at, needed);
        } else {
          ptx::copy_piece(k_to + to, keys + k_at, needed);
          ptx::copy_piece(v_to + to, values + v_at, needed);
        }
      } else {
        const std::uint32_t to = row * W::kRowBytes + piece_offset(row, piece);
        // Channels past the last stay the zeros that they are from the start.
        if (piece * 8 < k_.op.qk_dim) ptx::copy_piece(k_to + to, keys + k_at, needed);
        if (piece * 8 < k_.op.v_dim) ptx::copy_piece(v_to + to, values + v_at, needed);
      }
    }
  }

  const KernelParams& k_;
  Slice<W> (&ring_)[W::kStages];
  split_kv::RangeWalk walk_;
  JobShare share_;
  std::int32_t tile_ = 0;  ///< Of the share.
  bool more_;
  bool needed_ = false;
  std::int32_t block_ = 0, row_ = 0;
};

}  // namespace fovea::cuda::decode
