// The score warpgroup: queries to shared memory, S = K Q, softmax, P.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"
#include "backends/cuda/sm90/mla_decode/load.cuh"
#include "backends/cuda/sm90/mla_decode/softmax.cuh"
#include "backends/cuda/sm90/mla_decode/visible_keys.cuh"

namespace fovea::cuda::mla {

/// Q [rows, 576] of the row tile to shared memory, chunks in travelling order; absent rows are 0.
/// And what the rows see.
template <typename T, int kRows>
__device__ void load_query(const KernelParams& k, const Job& job, SharedMemory<kRows>& s) {
  load_query_rows<T, kRows, 4>(k, job, [&](int chunk) { return s.q[position_of(chunk)]; });
  const std::int32_t row = threadIdx.x % 128;
  if (row < kRows) s.seen[row] = seen_keys(k, job, row);
  ptx::wait_for_pieces();
}

/// The score warpgroup at work on one job.
template <typename T, int kRows>
struct Scores {
  using Ring = RingPosition<SharedMemory<kRows>::kSlots>;
  static constexpr int kBlocks = kRows / 8;  // Column blocks of the fragments.

  const KernelParams& k;
  const Job& job;
  SharedMemory<kRows>& s;
  Ring& ring;
  std::uint32_t& message;
  const VisibleKeys visible;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int g = lane / 4;
  const int c = lane % 4;
  const float scale = k.op.sm_scale * kLog2e;
  Softmax<kRows> softmax;

  __device__ Scores(const KernelParams& k, const Job& job, SharedMemory<kRows>& s, Ring& ring,
                    std::uint32_t& message)
      : k(k), job(job), s(s), ring(ring), message(message), visible(visible_keys(k, job)) {}

  /// Issues S^T [64 keys, rows] = sum over 9 chunks of K [64, 64] Q^T [64, rows].
  __device__ __forceinline__ void issue(float (&score)[kRows / 2]) {
    const auto tile_ring = ring.uniform();
    std::uint64_t q_operand = ptx::swizzled_operand(ptx::shared_address(s.q[0]));
    asm volatile("" : "+l"(q_operand));  // 36 hoisted sums of it would spill.
    constexpr std::uint32_t kQueryChunk = kRows * 128 >> 4;
    // All chunks first, then products without a break.
#pragma unroll
    for (int position = 0; position < kChunks; ++position) {
      const auto at = tile_ring.chunk(position);
      ptx::mbarrier_wait(ptx::shared_address(&s.full[at.slot]), at.parity);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int position = 0; position < kChunks; ++position) {
      const auto at = tile_ring.chunk(position);
      const std::uint64_t k_operand = ptx::swizzled_operand(ptx::shared_address(s.ring[at.slot]));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma<T, ptx::AMajor::k, kRows>(score, k_operand + step * 2,
                                             q_operand + position * kQueryChunk + step * 2,
                                             position + step > 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// Scores of drafts that a row does not see become -inf.
  __device__ __forceinline__ void mask_drafts(float (&score)[kRows / 2],
                                              std::int32_t first_key) const {
    const std::int32_t first_draft = job.seq_len - job.query_len - first_key;
    const int key = warp * 16 + g;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const std::uint64_t seen =
            drafts_of_tile(s.seen[8 * j + 2 * c + b].drafts, first_draft) >> key;
        if ((seen & 1) == 0) score[4 * j + b] = -INFINITY;
        if ((seen >> 8 & 1) == 0) score[4 * j + 2 + b] = -INFINITY;
      }
    }
  }

  /// Scores in log2 units; -inf where a row does not see a key.
  __device__ __forceinline__ void scale_and_mask(float (&score)[kRows / 2], std::int32_t tile) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) score[i] *= scale;
    const std::int32_t first_key = tile * kKeyTile;
    if (visible.are_common(first_key, first_key + kKeyTile)) return;
    const std::int32_t key = first_key + warp * 16 + g;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const std::int32_t begin = s.seen[8 * j + 2 * c + b].begin;
        const std::int32_t end = s.seen[8 * j + 2 * c + b].end;
        if (key < begin || key >= end) score[4 * j + b] = -INFINITY;
        if (key + 8 < begin || key + 8 >= end) score[4 * j + 2 + b] = -INFINITY;
      }
    }
    if (has_drafts(k, job, first_key)) mask_drafts(score, first_key);
    ptx::named_barrier(kScoreBarrier, 128);  // All of S is there.
    zero_spoiling_keys<T>(visible, first_key,
                          [&](int chunk) { return s.ring[ring.chunk(position_of(chunk)).slot]; });
  }

  /// Softmax of the current tile against the lagging maximum, and P to the output warpgroups.
  __device__ __forceinline__ void publish(float (&score)[kRows / 2], std::int32_t tile) {
    scale_and_mask(score, tile);
    float over_keys[kBlocks][2];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      over_keys[j][0] = fmaxf(score[4 * j], score[4 * j + 2]);
      over_keys[j][1] = fmaxf(score[4 * j + 1], score[4 * j + 3]);
    }
    const auto change = softmax.advance_maxima(over_keys, s.warp_max[tile & 1]);
    // P = 2^(score - max), against 0 where nothing is visible yet.
    const float2 base = softmax.base();
    std::uint32_t packed[kBlocks][2];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float a = __shfl_sync(~0u, base.x, 4 * j + c);
      const float b = __shfl_sync(~0u, base.y, 4 * j + c);
      const float p0 = exp2_approx(score[4 * j] - a), p1 = exp2_approx(score[4 * j + 1] - b);
      const float p2 = exp2_approx(score[4 * j + 2] - a), p3 = exp2_approx(score[4 * j + 3] - b);
      over_keys[j][0] = p0 + p2;
      over_keys[j][1] = p1 + p3;
      packed[j][0] = pack<T>(p0, p1);
      packed[j][1] = pack<T>(p2, p3);
    }

    ptx::mbarrier_wait(ptx::shared_address(&s.handover.p_empty), (message & 1) ^ 1);
    ++message;
    store_probabilities<kRows>(ptx::shared_address(s.p), packed);
    softmax.hand_over(change, s.handover);
    softmax.add_sums(over_keys, change);
  }

  __device__ __forceinline__ void tiles() {
    for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile) {
      float score[kRows / 2];
      issue(score);
      ptx::wgmma_wait<0>();
      ptx::pin(score);
      // The rope chunk is not needed any more.
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[ring.slot]));
      publish(score, tile);
      ring.advance(kChunks);
    }
  }
};

/// Scores, softmax and P of the block's key tiles. Run by one warpgroup.
template <typename T, int kRows>
__device__ __forceinline__ void score_tiles(const KernelParams& k, const Job& job,
                                            SharedMemory<kRows>& s,
                                            RingPosition<SharedMemory<kRows>::kSlots>& ring,
                                            std::uint32_t& message) {
  Scores<T, kRows> scores(k, job, s, ring, message);
  scores.tiles();
  scores.softmax.publish_sums(s.warp_max[0], s.handover, message);
}

}  // namespace fovea::cuda::mla
