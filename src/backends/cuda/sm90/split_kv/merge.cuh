// Merging partial results of attention.
#pragma once

#include "backends/cuda/sm90/arithmetic.cuh"

namespace fovea::cuda::split_kv {

/// Weight of a partial result whose maximum is `own`. An empty one carries none.
__device__ __forceinline__ float merge_weight(float own, float max) {
  return own == -INFINITY ? 0.f : exp2_approx(own - max);
}

/// One float4 of a merged result: 2 channels x 2 rows; x and z are of the first row.
struct MergedValue {
  float4 value;  ///< Sum of weight * value.
  float2 max;    ///< Of the two rows.
  float2 sum;
};

/// Merges `count` results: stats(i) gives (max, max), (sum, sum) of the two rows, value(i) the
/// float4. kFlight results are asked for at once.
template <int kFlight, typename Stats, typename Value>
__device__ __forceinline__ MergedValue merge_values(int count, Stats stats, Value value) {
  MergedValue merged{{0.f, 0.f, 0.f, 0.f}, {-INFINITY, -INFINITY}, {0.f, 0.f}};
  for (int first = 0; first < count; first += kFlight) {
    float4 v[kFlight];
    float2 m[kFlight], l[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      m[i] = float2{-INFINITY, -INFINITY};
      l[i] = float2{0.f, 0.f};
      v[i] = float4{0.f, 0.f, 0.f, 0.f};
      if (first + i < count) {
        stats(first + i, m[i], l[i]);
        v[i] = value(first + i);
      }
    }
    float2 max = merged.max;
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      max.x = m[i].x > max.x || m[i].x != m[i].x ? m[i].x : max.x;
      max.y = m[i].y > max.y || m[i].y != m[i].y ? m[i].y : max.y;
    }
    const float old0 = merge_weight(merged.max.x, max.x), old1 = merge_weight(merged.max.y, max.y);
    merged.max = max;
    merged.sum = float2{merged.sum.x * old0, merged.sum.y * old1};
    merged.value = float4{merged.value.x * old0, merged.value.y * old1, merged.value.z * old0,
                          merged.value.w * old1};
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const float w0 = merge_weight(m[i].x, max.x), w1 = merge_weight(m[i].y, max.y);
      // An empty result weighs nothing, whatever its values are.
      if (m[i].x != -INFINITY) {
        merged.sum.x += w0 * l[i].x;
        merged.value.x += w0 * v[i].x;
        merged.value.z += w0 * v[i].z;
      }
      if (m[i].y != -INFINITY) {
        merged.sum.y += w1 * l[i].y;
        merged.value.y += w1 * v[i].y;
        merged.value.w += w1 * v[i].w;
      }
    }
  }
  return merged;
}

}  // namespace fovea::cuda::split_kv
