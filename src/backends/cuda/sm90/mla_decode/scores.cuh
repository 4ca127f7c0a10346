// The score warpgroup: queries to shared memory, S = K Q, softmax, P.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"
#include "backends/cuda/sm90/mla_decode/softmax.cuh"

namespace fovea::cuda::mla {

/// Q [rows, 576] of the row tile to shared memory, chunks in travelling order; absent rows are 0.
template <typename T, int kRows>
__device__ void load_query(const KernelParams& k, const Job& job, SharedMemory<kRows>& s) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const MlaDecodeParams& op = k.op;
  if (threadIdx.x % 128 < kRows) {
    const auto heads = static_cast<std::uint32_t>(op.num_heads);
    const std::uint32_t first = job.first_row, row = threadIdx.x % 128;
    s.query_of_row[row] = static_cast<std::uint8_t>((first + row) / heads - first / heads);
  }
  const std::uint32_t q = ptx::shared_address(s.q[0]);
#pragma unroll 4
  for (int row = warp; row < kRows; row += 4) {
    const bool exists = row < job.num_rows;
    const std::uint32_t r = job.first_row + (exists ? row : 0);
    const std::uint32_t token = r / static_cast<std::uint32_t>(op.num_heads);
    const std::uint32_t head = r - token * op.num_heads;
    const std::int64_t t = job.query_begin + static_cast<std::int64_t>(token);
    const auto* latent = reinterpret_cast<const uint4*>(static_cast<const T*>(op.q_latent) +
                                                        t * op.q_latent_token_stride +
                                                        head * op.q_latent_head_stride);
    const auto* pe = reinterpret_cast<const uint4*>(
        static_cast<const T*>(op.q_pe) + t * op.q_pe_token_stride + head * op.q_pe_head_stride);
    const std::uint32_t to = q + row * 128 + ((lane % 8) ^ (row % 8)) * 16;
    constexpr std::uint32_t kChunk = kRows * 128;
    ptx::copy_piece(to + position_of(lane / 8) * kChunk, latent + lane, exists);
    ptx::copy_piece(to + position_of(4 + lane / 8) * kChunk, latent + 32 + lane, exists);
    if (lane < 8) ptx::copy_piece(to + position_of(8) * kChunk, pe + lane, exists);
  }
  ptx::wait_for_pieces();
}

/// The keys that the rows of a tile see.
struct VisibleKeys {
  std::int32_t first_position;            ///< Of the first row's query token in its sequence.
  std::int32_t any_begin, any_end;        ///< Some row sees them.
  std::int32_t common_begin, common_end;  ///< Every row sees them.
};

__device__ inline VisibleKeys visible_keys(const MlaDecodeParams& op, const Job& job) {
  const std::int32_t context = job.seq_len - job.query_len;
  const std::int32_t first = context + job.first_row / op.num_heads;
  const std::int32_t last = context + (job.first_row + max(job.num_rows, 1) - 1) / op.num_heads;
  VisibleKeys v{first, 0, job.seq_len, 0, job.seq_len};
  if (op.causal) v.any_end = last + 1, v.common_end = first + 1;
  if (op.window_left >= 0) {
    v.any_begin = first - op.window_left;
    v.common_begin = last - op.window_left;
  }
  return v;
}

/// Zeros those keys of a tile that only some of the rows see and that hold a NaN or an infinity:
/// rows that see them have a NaN in their weight already, and for the others 0 * NaN would spoil
/// the output. Run by the score warpgroup once S is there, which needs the keys as they are.
/// `chunk_of` gives the address of a channel chunk.
template <typename T, typename ChunkOf>
__device__ __forceinline__ void zero_spoiling_keys(const VisibleKeys& visible,
                                                   std::int32_t first_key, ChunkOf chunk_of) {
  constexpr std::uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c007c00 : 0x7f807f80;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const std::int32_t any_begin = max(visible.any_begin - first_key, 0);
  const std::int32_t any_end = min(visible.any_end - first_key, kKeyTile);
  const std::int32_t common_begin = visible.common_begin - first_key;
  const std::int32_t common_end = visible.common_end - first_key;
#pragma unroll 1
  for (int key = any_begin + warp; key < any_end; key += 4) {
    if (key >= common_begin && key < common_end) continue;
    uint4* pieces[2];
    bool spoils = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pieces[i] = reinterpret_cast<uint4*>(chunk_of(lane / 8 + 4 * i)) + key * 8 + lane % 8;
      const uint4 v = *pieces[i];
      for (const std::uint32_t word : {v.x, v.y, v.z, v.w}) {
        spoils |= (word & kExponent & 0xffff) == (kExponent & 0xffff) ||
                  (word & kExponent) >> 16 == kExponent >> 16;
      }
    }
    if (__any_sync(~0u, spoils)) *pieces[0] = *pieces[1] = uint4{0, 0, 0, 0};
  }
  ptx::fence_async_proxy();
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
      : k(k), job(job), s(s), ring(ring), message(message), visible(visible_keys(k.op, job)) {}

  /// Zeros the keys of the tile at `at` that no row sees: they may be NaN, and 0 * NaN would spoil
  /// the output.
  __device__ __forceinline__ void zero_unseen_keys(const Ring& at, std::int32_t first_key) {
    const std::int32_t begin = visible.any_begin - first_key;  // The tile's keys seen by some row.
    const std::int32_t end = visible.any_end - first_key;
    if (begin <= 0 && end >= kKeyTile) return;
    for (int position = 0; position < kChunks; ++position) {
      const auto chunk = at.chunk(position);
      ptx::mbarrier_wait(ptx::shared_address(&s.full[chunk.slot]), chunk.parity);
      auto* pieces = reinterpret_cast<uint4*>(s.ring[chunk.slot]);
      for (int i = threadIdx.x % 128; i < kKeyTile * 8; i += 128) {
        if (i / 8 < begin || i / 8 >= end) pieces[i] = uint4{0, 0, 0, 0};
      }
    }
    ptx::fence_async_proxy();
    ptx::named_barrier(kScoreBarrier, 128);
  }

  /// Issues S^T [64 keys, rows] = sum over 9 chunks of K [64, 64] Q^T [64, rows].
  __device__ __forceinline__ void issue(float (&score)[kRows / 2], const Ring& position_of_tile,
                                        std::int32_t tile) {
    zero_unseen_keys(position_of_tile, tile * kKeyTile);
    const auto tile_ring = position_of_tile.uniform();
    std::uint64_t q_operand = ptx::swizzled_operand(ptx::shared_address(s.q[0]));
    asm volatile("" : "+l"(q_operand));  // 36 hoisted sums of it would spill.
    constexpr std::uint32_t kQueryChunk = kRows * 128 >> 4;
    // All chunks first, then products without a break: 6% faster at 64 rows than chunk by chunk.
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

  /// Scores in log2 units; -inf where a row does not see a key.
  __device__ __forceinline__ void scale_and_mask(float (&score)[kRows / 2], std::int32_t tile) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) score[i] *= scale;
    const std::int32_t first_key = tile * kKeyTile;
    if (first_key >= visible.common_begin && first_key + kKeyTile <= visible.common_end) return;
    const std::int32_t key = first_key + warp * 16 + g;
    const std::int32_t window = k.op.window_left < 0 ? INT32_MAX : k.op.window_left;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const std::int32_t position = visible.first_position + s.query_of_row[8 * j + 2 * c + b];
        const std::int32_t begin = position - window;
        const std::int32_t end = k.op.causal ? position + 1 : job.seq_len;
        if (key < begin || key >= end) score[4 * j + b] = -INFINITY;
        if (key + 8 < begin || key + 8 >= end) score[4 * j + 2 + b] = -INFINITY;
      }
    }
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
      issue(score, ring, tile);
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
