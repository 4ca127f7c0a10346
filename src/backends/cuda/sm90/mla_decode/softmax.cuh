// The running softmax of a score warpgroup: maxima that lag, sums, and what goes with P.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

/// Writes P^T [rows][64 keys] in the 128-byte swizzle. packed[j] holds, of column block j, the
/// thread's two columns of keys 16 warp + g and 16 warp + g + 8.
template <int kRows>
__device__ __forceinline__ void store_probabilities(std::uint32_t p_tile,
                                                    const std::uint32_t (&packed)[kRows / 8][2]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  // Lane l addresses row l % 8 of matrix l / 8 (column block, key half).
  const int row = lane / 16 * 8 + lane % 8;
  const int piece = warp * 2 + lane / 8 % 2;
  const std::uint32_t p = p_tile + row * 128 + ((piece ^ (row % 8)) << 4);
#pragma unroll
  for (int j = 0; j < kRows / 8; j += 2) {
    ptx::store_matrices_transposed(p + j * 8 * 128, packed[j][0], packed[j][1], packed[j + 1][0],
                                   packed[j + 1][1]);
  }
}

/// One thread's part. A lane keeps two columns for its warp: own_column and the next. The score
/// warps, kWarps of them, come after the output warpgroups.
template <int kRows, int kWarps = 4>
struct Softmax {
  static constexpr int kBlocks = kRows / 8;  // Column blocks of the fragments.
  /// What a tile's maxima do to what was there before.
  struct Change {
    float factor0, factor1;
    bool rescale;
  };

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 - kOutputThreads / 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int own_column = (g < kBlocks ? 8 * g : 0) + 2 * c;
  // Reference maximum (log2 units), sum over this warp's keys.
  float max0 = -INFINITY, max1 = -INFINITY;
  float sum0 = 0.f, sum1 = 0.f;

  /// Reduces each column over the lanes of the warp; columns own_column and the next come back.
  /// Lanes halve the columns between them: 14 shuffles at 32 rows, where a result in every lane
  /// would take 24.
  template <typename Reduce>
  __device__ __forceinline__ float2 reduce_columns(float (&v)[kBlocks][2], Reduce reduce) const {
    // Lane bits above those that choose a column block first: lanes that differ in them share it.
#pragma unroll
    for (int step = 16; step / 4 >= kBlocks; step /= 2) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        v[j][0] = reduce(v[j][0], __shfl_xor_sync(~0u, v[j][0], step));
        v[j][1] = reduce(v[j][1], __shfl_xor_sync(~0u, v[j][1], step));
      }
    }
#pragma unroll
    for (int half = kBlocks / 2; half > 0; half /= 2) {
      const bool upper = (g & half) != 0;
#pragma unroll
      for (int j = 0; j < half; ++j) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const float kept = upper ? v[j + half][b] : v[j][b];
          const float given = upper ? v[j][b] : v[j + half][b];
          v[j][b] = reduce(kept, __shfl_xor_sync(~0u, given, half * 4));
        }
      }
    }
    return float2{v[0][0], v[0][1]};
  }

  /// Takes the maxima of a tile, over this thread's keys, into the reference maxima of all warps.
  __device__ __forceinline__ Change advance_maxima(float (&over_keys)[kBlocks][2],
                                                   float (&warp_max)[kWarps][kRows]) {
    const float2 mine = reduce_columns(over_keys, [](float a, float b) { return fmaxf(a, b); });
    if (g < kBlocks) *reinterpret_cast<float2*>(&warp_max[warp][own_column]) = mine;
    ptx::named_barrier(kScoreBarrier, 32 * kWarps);
    float2 tile_max = *reinterpret_cast<const float2*>(&warp_max[0][own_column]);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
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
    return Change{factor0, factor1, rescale};
  }

  /// What scores are weighed against: 0 where nothing is visible yet.
  __device__ __forceinline__ float2 base() const {
    return float2{max0 == -INFINITY ? 0.f : max0, max1 == -INFINITY ? 0.f : max1};
  }

  /// Adds a tile's sums over this thread's keys.
  __device__ __forceinline__ void add_sums(float (&over_keys)[kBlocks][2], const Change& change) {
    const float2 sums = reduce_columns(over_keys, [](float a, float b) { return a + b; });
    sum0 = sum0 * change.factor0 + sums.x;
    sum1 = sum1 * change.factor1 + sums.y;
  }

  /// Hands P, which is written, to the output warpgroups.
  __device__ __forceinline__ void hand_over(const Change& change, Handover<kRows>& h) const {
    if (warp == 0) {
      if (g < kBlocks) {
        *reinterpret_cast<float2*>(&h.message[0][own_column]) =
            float2{change.factor0, change.factor1};
      }
      if (lane == 0) h.rescale = change.rescale;
    }
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive(ptx::shared_address(&h.p_full));
  }

  /// The job's last message: maxima and sums.
  __device__ __forceinline__ void publish_sums(float (&warp_max)[kWarps][kRows], Handover<kRows>& h,
                                               std::uint32_t& message) {
    ptx::named_barrier(kScoreBarrier, 32 * kWarps);  // Everyone has read the last tile's maxima.
    if (g < kBlocks) {
      *reinterpret_cast<float2*>(&warp_max[warp][own_column]) = float2{sum0, sum1};
    }
    ptx::named_barrier(kScoreBarrier, 32 * kWarps);
    ptx::mbarrier_wait(ptx::shared_address(&h.p_empty), (message & 1) ^ 1);
    ++message;
    if (warp == 0 && g < kBlocks) {
      float2 total{0.f, 0.f};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 part = *reinterpret_cast<const float2*>(&warp_max[w][own_column]);
        total.x += part.x;
        total.y += part.y;
      }
      // The maximum passes over a NaN; a merge must not take its row for an empty one.
      *reinterpret_cast<float2*>(&h.message[0][own_column]) =
          float2{isnan(total.x) ? total.x : max0, isnan(total.y) ? total.y : max1};
      *reinterpret_cast<float2*>(&h.message[1][own_column]) = total;
    }
    ptx::named_barrier(kScoreBarrier,
                       32 * kWarps);  // The sums are read before the next job's maxima come.
    ptx::mbarrier_arrive(ptx::shared_address(&h.p_full));
  }
};

}  // namespace fovea::cuda::mla
