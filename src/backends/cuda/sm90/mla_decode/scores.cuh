// The score warpgroup: queries to shared memory, S = K Q, softmax, P.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

/// Q [rows, 576] of the row tile to shared memory, chunks in travelling order; absent rows are 0.
template <typename T, int kRows>
__device__ void load_query(const KernelParams& k, const Job& job, SharedMemory<kRows>& s) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const MlaDecodeParams& op = k.op;
  constexpr int kBatch = 4;  // Rows in flight per warp: 12 loads of 16 bytes a lane.
  for (int first = warp; first < kRows; first += 4 * kBatch) {
    uint4 piece[kBatch][3];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = first + 4 * b;
      piece[b][0] = piece[b][1] = piece[b][2] = uint4{0, 0, 0, 0};
      if (row < job.num_rows) {
        const std::uint32_t r = job.first_row + row;
        const std::uint32_t token = r / static_cast<std::uint32_t>(op.num_heads);
        const std::uint32_t head = r - token * op.num_heads;
        const std::int64_t t = job.query_begin + static_cast<std::int64_t>(token);
        const auto* latent = reinterpret_cast<const uint4*>(static_cast<const T*>(op.q_latent) +
                                                            t * op.q_latent_token_stride +
                                                            head * op.q_latent_head_stride);
        const auto* pe = reinterpret_cast<const uint4*>(
            static_cast<const T*>(op.q_pe) + t * op.q_pe_token_stride + head * op.q_pe_head_stride);
        piece[b][0] = __ldg(latent + lane);
        piece[b][1] = __ldg(latent + lane + 32);
        if (lane < 8) piece[b][2] = __ldg(pe + lane);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = first + 4 * b;
      const int swizzled = ((lane % 8) ^ (row % 8)) * 16;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int chunk = i * 4 + lane / 8;
        if (chunk < kChunks) {
          *reinterpret_cast<uint4*>(s.q[position_of(chunk)] + row * 128 + swizzled) = piece[b][i];
        }
      }
    }
  }
}

/// The keys that row tile column `column` sees: [0, limit).
__device__ __forceinline__ std::int32_t visible_keys(const MlaDecodeParams& op, const Job& job,
                                                     int column) {
  if (!op.causal) return job.seq_len;
  const auto query = static_cast<std::int32_t>(static_cast<std::uint32_t>(job.first_row + column) /
                                               static_cast<std::uint32_t>(op.num_heads));
  return job.seq_len - job.query_len + 1 + query;
}

/// Scores, softmax and P of the block's key tiles. Run by one warpgroup.
template <typename T, int kRows>
__device__ void score_tiles(const KernelParams& k, const Job& job, SharedMemory<kRows>& s,
                            RingPosition<SharedMemory<kRows>::kSlots>& ring,
                            std::uint32_t& message) {
  constexpr int kBlocks = kRows / 8;  // Column blocks of the fragments.
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int g = lane / 4;
  const int c = lane % 4;
  const float scale = k.op.sm_scale * kLog2e;
  const std::uint64_t q_operand = ptx::swizzled_operand(ptx::shared_address(s.q[0]));
  constexpr std::uint32_t kQueryChunk = kRows * 128 >> 4;
  const std::int32_t common_limit = visible_keys(k.op, job, 0);

  // Reference maximum of columns 8 g + 2 c and the next (log2 units); sums of this thread's keys.
  float max0 = -INFINITY, max1 = -INFINITY;
  float sum[kBlocks][2];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) sum[j][0] = sum[j][1] = 0.f;

  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile) {
    const std::int32_t keys = job.seq_len - tile * kKeyTile;
    if (keys < kKeyTile) {
      // What lies behind the last key may be NaN, and 0 * NaN would spoil the output.
      for (int position = 0; position < kChunks; ++position) {
        const auto at = ring.plus(position);
        ptx::mbarrier_wait(ptx::shared_address(&s.full[at.slot]), at.parity);
        auto* rows = reinterpret_cast<uint4*>(s.ring[at.slot]);
        for (int i = keys * 8 + threadIdx.x % 128; i < kKeyTile * 8; i += 128) {
          rows[i] = uint4{0, 0, 0, 0};
        }
      }
      ptx::fence_async_proxy();
      ptx::named_barrier(kScoreBarrier, 128);
    }

    // S^T [64 keys, rows] = sum over 9 chunks of K [64, 64] Q^T [64, rows].
    const auto tile_ring = ring.uniform();
    float score[kRows / 2];
    // All chunks first, then products without a break: 6% faster at 64 rows than chunk by chunk.
#pragma unroll
    for (int position = 0; position < kChunks; ++position) {
      const auto at = tile_ring.plus(position);
      ptx::mbarrier_wait(ptx::shared_address(&s.full[at.slot]), at.parity);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int position = 0; position < kChunks; ++position) {
      const auto at = tile_ring.plus(position);
      const std::uint64_t k_operand = ptx::swizzled_operand(ptx::shared_address(s.ring[at.slot]));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma<T, ptx::AMajor::k, kRows>(score, k_operand + step * 2,
                                             q_operand + position * kQueryChunk + step * 2,
                                             position + step > 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(score);
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[ring.slot]));  // Rope chunk.
    ring.advance(kChunks);

#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) score[i] *= scale;
    if ((tile + 1) * kKeyTile > common_limit) {
      const std::int32_t key = tile * kKeyTile + warp * 16 + g;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const std::int32_t limit = visible_keys(k.op, job, 8 * j + 2 * c + b);
          if (key >= limit) score[4 * j + b] = -INFINITY;
          if (key + 8 >= limit) score[4 * j + 2 + b] = -INFINITY;
        }
      }
    }

    // Maximum of each column: over the lanes of a warp, then over the warps.
    float mine0 = -INFINITY, mine1 = -INFINITY;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      float a = fmaxf(score[4 * j], score[4 * j + 2]);
      float b = fmaxf(score[4 * j + 1], score[4 * j + 3]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        a = fmaxf(a, __shfl_xor_sync(~0u, a, step));
        b = fmaxf(b, __shfl_xor_sync(~0u, b, step));
      }
      if (g == j) mine0 = a, mine1 = b;
    }
    float(&warp_max)[4][kRows] = s.warp_max[tile & 1];
    const int own_column = (g < kBlocks ? 8 * g : 0) + 2 * c;
    if (g < kBlocks) {
      *reinterpret_cast<float2*>(&warp_max[warp][own_column]) = float2{mine0, mine1};
    }
    ptx::named_barrier(kScoreBarrier, 128);
    float2 tile_max = *reinterpret_cast<const float2*>(&warp_max[0][own_column]);
#pragma unroll
    for (int w = 1; w < 4; ++w) {
      const float2 other = *reinterpret_cast<const float2*>(&warp_max[w][own_column]);
      tile_max.x = fmaxf(tile_max.x, other.x);
      tile_max.y = fmaxf(tile_max.y, other.y);
    }
    const bool keep0 = tile_max.x <= max0 + kMaxLag;
    const bool keep1 = tile_max.y <= max1 + kMaxLag;
    const float factor0 = keep0 ? 1.f : exp2_approx(max0 - tile_max.x);
    const float factor1 = keep1 ? 1.f : exp2_approx(max1 - tile_max.y);
    if (!keep0) max0 = tile_max.x;
    if (!keep1) max1 = tile_max.y;
    const bool rescale = __any_sync(~0u, !(keep0 && keep1));

    if (rescale) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        sum[j][0] *= __shfl_sync(~0u, factor0, 4 * j + c);
        sum[j][1] *= __shfl_sync(~0u, factor1, 4 * j + c);
      }
    }
    // P = 2^(score - max), against 0 where nothing is visible yet.
    const float base0 = max0 == -INFINITY ? 0.f : max0;
    const float base1 = max1 == -INFINITY ? 0.f : max1;
    std::uint32_t packed[kBlocks][2];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float a = __shfl_sync(~0u, base0, 4 * j + c);
      const float b = __shfl_sync(~0u, base1, 4 * j + c);
      const float p0 = exp2_approx(score[4 * j] - a), p1 = exp2_approx(score[4 * j + 1] - b);
      const float p2 = exp2_approx(score[4 * j + 2] - a), p3 = exp2_approx(score[4 * j + 3] - b);
      sum[j][0] += p0 + p2;
      sum[j][1] += p1 + p3;
      packed[j][0] = pack<T>(p0, p1);
      packed[j][1] = pack<T>(p2, p3);
    }

    ptx::mbarrier_wait(ptx::shared_address(&s.p_empty), (message & 1) ^ 1);
    ++message;
    // P^T [rows][64 keys]: lane l addresses row l % 8 of matrix l / 8 (column block, key half).
    const int row = lane / 16 * 8 + lane % 8;
    const int piece = warp * 2 + lane / 8 % 2;
    const std::uint32_t p = ptx::shared_address(s.p) + row * 128 + ((piece ^ (row % 8)) << 4);
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      ptx::store_matrices_transposed(p + j * 8 * 128, packed[j][0], packed[j][1], packed[j + 1][0],
                                     packed[j + 1][1]);
    }
    if (warp == 0) {
      if (g < kBlocks) {
        *reinterpret_cast<float2*>(&s.message[0][own_column]) = float2{factor0, factor1};
      }
      if (lane == 0) s.rescale = rescale;
    }
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive(ptx::shared_address(&s.p_full));
  }

  // The last message: maxima and sums.
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      sum[j][0] += __shfl_xor_sync(~0u, sum[j][0], step);
      sum[j][1] += __shfl_xor_sync(~0u, sum[j][1], step);
    }
  }
  ptx::named_barrier(kScoreBarrier, 128);  // Everyone has read the last tile's maxima.
  if (g == 0) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      *reinterpret_cast<float2*>(&s.warp_max[0][warp][8 * j + 2 * c]) =
          float2{sum[j][0], sum[j][1]};
    }
  }
  ptx::named_barrier(kScoreBarrier, 128);
  ptx::mbarrier_wait(ptx::shared_address(&s.p_empty), (message & 1) ^ 1);
  ++message;
  if (warp == 0 && g < kBlocks) {
    const int column = 8 * g + 2 * c;
    float2 total{0.f, 0.f};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(&s.warp_max[0][w][column]);
      total.x += part.x;
      total.y += part.y;
    }
    *reinterpret_cast<float2*>(&s.message[0][column]) = float2{max0, max1};
    *reinterpret_cast<float2*>(&s.message[1][column]) = total;
  }
  ptx::named_barrier(kScoreBarrier, 128);  // The sums are read before the next job's maxima come.
  ptx::mbarrier_arrive(ptx::shared_address(&s.p_full));
}

}  // namespace fovea::cuda::mla
