// The output warpgroups: O += V P, and outputs that need no merge.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

/// O^T of one warpgroup: 4 tiles of [64 channels, rows].
template <int kRows>
using OutputFragment = float[kChunksPerOutput][kRows / 2];

/// O^T [256 channels, rows] += V^T [256, 64] P^T [64, rows] over `tiles` key tiles. Leaves the
/// last message to be read by the caller.
template <typename T, int kRows>
__device__ void accumulate_tiles(std::int32_t tiles, SharedMemory<kRows>& s,
                                 RingPosition<SharedMemory<kRows>::kSlots>& ring,
                                 std::uint32_t& message, OutputFragment<kRows>& out) {
  constexpr int kBlocks = kRows / 8;
  const int lane = threadIdx.x % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int c = lane % 4;
  const std::uint64_t p_operand = ptx::swizzled_operand(ptx::shared_address(s.p));
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int e = 0; e < kRows / 2; ++e) out[i][e] = 0.f;
  }
  for (; tiles > 0; --tiles) {
    ptx::mbarrier_wait(ptx::shared_address(&s.handover.p_full), message & 1);
    ++message;
    if (s.handover.rescale) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const float2 factor =
            *reinterpret_cast<const float2*>(&s.handover.message[0][8 * j + 2 * c]);
#pragma unroll
        for (int i = 0; i < kChunksPerOutput; ++i) {
          out[i][4 * j] *= factor.x;
          out[i][4 * j + 1] *= factor.y;
          out[i][4 * j + 2] *= factor.x;
          out[i][4 * j + 3] *= factor.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) ptx::pin(out[i]);
    const auto tile_ring = ring.uniform();
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
      const auto at = tile_ring.chunk(1 + 2 * i + warpgroup);
      const std::uint64_t v_operand = ptx::swizzled_operand(ptx::shared_address(s.ring[at.slot]));
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // 16 keys: 16 rows of 128 bytes.
        ptx::wgmma<T, ptx::AMajor::m, kRows>(out[i], v_operand + step * (16 * 128 >> 4),
                                             p_operand + step * 2, true);
      }
      ptx::wgmma_commit();
    }
    const auto release = [&](int i) {
      if (lane == 0) {
        ptx::mbarrier_arrive(ptx::shared_address(&s.empty[ring.chunk(1 + 2 * i + warpgroup).slot]));
      }
    };
    ptx::wgmma_wait<3>();
    release(0);
    ptx::wgmma_wait<2>();
    release(1);
    ptx::wgmma_wait<1>();
    release(2);
    ptx::wgmma_wait<0>();
    release(3);
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) ptx::pin(out[i]);
    ptx::mbarrier_arrive(ptx::shared_address(&s.handover.p_empty));
    ring.advance(kChunks);
  }
  ptx::mbarrier_wait(ptx::shared_address(&s.handover.p_full), message & 1);
  ++message;
}

/// Which channels a thread's fragments are: of chunk `chunk`, rows g and g + 8 of warp `warp`'s 16
/// are channels channel() and channel() + kStep.
struct DenseOrder {
  static constexpr int kStep = 8;
  static constexpr int kFlight = 8;  ///< Partial results that a thread asks for at once.
  static __device__ int channel(int chunk, int warp, int g) { return chunk * 64 + warp * 16 + g; }
};

/// Writes normalised outputs straight from the fragments.
template <int kRows>
__device__ void store_output(DenseOrder, const KernelParams& k, const Job& job,
                             const Handover<kRows>& s, const OutputFragment<kRows>& out) {
  constexpr int kBlocks = kRows / 8;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int first_channel = threadIdx.x / 128 * kChunksPerOutput * 64 + thread / 32 * 16;
  const MlaDecodeParams& op = k.op;
  for (int row = threadIdx.x; row < kRows; row += kOutputThreads) {
    store_lse(k, job, row, s.message[0][row], s.message[1][row]);
  }
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const float2 sums = *reinterpret_cast<const float2*>(&s.message[1][8 * j + 2 * c]);
    const int column = 8 * j + 2 * c;
    const float inverse0 = inverse_sum(k, job, column, s.message[0][column], sums.x);
    const float inverse1 = inverse_sum(k, job, column + 1, s.message[0][column + 1], sums.y);
    if (op.out_type == ElementType::f32) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int row = 8 * j + 2 * c + b;
        if (row >= job.num_rows) continue;
        float* to = static_cast<float*>(op.out) + out_offset(k, job, row) + first_channel + g;
        const float inverse = b == 0 ? inverse0 : inverse1;
#pragma unroll
        for (int i = 0; i < kChunksPerOutput; ++i) {
          to[i * 64] = out[i][4 * j + b] * inverse;
          to[i * 64 + 8] = out[i][4 * j + 2 + b] * inverse;
        }
      }
      continue;
    }
    // A transposition across the warp brings a row's neighbouring channels together.
    const int row = 8 * j + g;
    const bool exists = row < job.num_rows;
    std::uint16_t* to = static_cast<std::uint16_t*>(op.out) +
                        (exists ? out_offset(k, job, row) : 0) + first_channel + 2 * c;
    const bool bf16 = op.out_type == ElementType::bf16;
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = out[i][4 * j + 2 * half] * inverse0;
        const float b = out[i][4 * j + 2 * half + 1] * inverse1;
        const std::uint32_t turned =
            ptx::transpose_matrix(bf16 ? pack<__nv_bfloat16>(a, b) : pack<__half>(a, b));
        if (exists) *reinterpret_cast<std::uint32_t*>(to + i * 64 + half * 8) = turned;
      }
    }
  }
}

}  // namespace fovea::cuda::mla
