// Merging partial results of attention.
#pragma once

#include "backends/cuda/sm90/arithmetic.cuh"

namespace fovea::cuda::split_kv {

/// Weight of a partial result whose maximum is `own`. An empty one carries none.
__device__ __forceinline__ float merge_weight(float own, float max) {
  return own == -INFINITY ? 0.f : exp2_approx(own - max);
}

/// Merged results of two rows, kValues float4 of 2 channels x 2 rows; x and z are of the first row.
template <int kValues>
struct MergedRows {
  float4 value[kValues];  ///< Sums of weight * value.
  float2 max;             ///< Of the two rows.
  float2 sum;
};

/// Lanes of a warp that have the same rows: kCount of them, kStep apart.
template <int kLanes, int kDistance>
struct LanesOfRows {
  static constexpr int kCount = kLanes, kStep = kDistance;
};

/// The larger one; NaN if one is.
__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

/// Merges `count` results: stats(i) gives (max, max), (sum, sum) of the two rows, values(i) where
/// the float4 lie, kStride apart; there are `existing` of them. kFlight results are asked for at
/// once; lanes with the same rows share out their weights. Run by whole warps.
template <int kFlight, int kValues, int kStride, typename Lanes, typename Stats, typename Values>
__device__ __forceinline__ MergedRows<kValues> merge_rows(int count, int existing, Stats stats,
                                                          Values values) {
  constexpr int kOwn = (kFlight + Lanes::kCount - 1) / Lanes::kCount;
  const int lane = threadIdx.x % 32;
  const int share = lane / Lanes::kStep % Lanes::kCount;
  MergedRows<kValues> merged{{}, {-INFINITY, -INFINITY}, {0.f, 0.f}};
#pragma unroll 1
  for (int first = 0; first < count; first += kFlight) {
    float4 v[kFlight][kValues];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const float4* from = values(first + i);
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
        v[i][n] = float4{0.f, 0.f, 0.f, 0.f};
        if (first + i < count && n < existing) v[i][n] = __ldcg(from + n * kStride);
      }
    }
    float2 m[kOwn], l[kOwn], max = merged.max;
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int i = o * Lanes::kCount + share;
      m[o] = float2{-INFINITY, -INFINITY};
      l[o] = float2{0.f, 0.f};
      if (i < kFlight && first + i < count) stats(first + i, m[o], l[o]);
      max = float2{larger(max.x, m[o].x), larger(max.y, m[o].y)};
    }
#pragma unroll
    for (int step = 1; step < Lanes::kCount; step *= 2) {
      max.x = larger(max.x, __shfl_xor_sync(~0u, max.x, step * Lanes::kStep));
      max.y = larger(max.y, __shfl_xor_sync(~0u, max.y, step * Lanes::kStep));
    }
    float2 sum{0.f, 0.f};
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {  // Maxima become weights.
      m[o] = float2{merge_weight(m[o].x, max.x), merge_weight(m[o].y, max.y)};
      sum = float2{sum.x + m[o].x * l[o].x, sum.y + m[o].y * l[o].y};
    }
#pragma unroll
    for (int step = 1; step < Lanes::kCount; step *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, step * Lanes::kStep);
      sum.y += __shfl_xor_sync(~0u, sum.y, step * Lanes::kStep);
    }
    const float old0 = merge_weight(merged.max.x, max.x), old1 = merge_weight(merged.max.y, max.y);
    merged.max = max;
    merged.sum = float2{merged.sum.x * old0 + sum.x, merged.sum.y * old1 + sum.y};
#pragma unroll
    for (float4& to : merged.value) to = {to.x * old0, to.y * old1, to.z * old0, to.w * old1};
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int from = lane + (i % Lanes::kCount - share) * Lanes::kStep;
      const float w0 = __shfl_sync(~0u, m[i / Lanes::kCount].x, from);
      const float w1 = __shfl_sync(~0u, m[i / Lanes::kCount].y, from);
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
        float4& to = merged.value[n];
        to = {to.x + w0 * v[i][n].x, to.y + w1 * v[i][n].y, to.z + w0 * v[i][n].z,
              to.w + w1 * v[i][n].w};
      }
    }
  }
  return merged;
}

}  // namespace fovea::cuda::split_kv
