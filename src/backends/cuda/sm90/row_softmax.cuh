// The running softmax of scores in fragments of matrix products. Lane l of a warp that has 16 rows
// holds, with g = l / 4 and c = l % 4, of rows g and g + 8 the keys 8 j + 2 c and the next:
// score[4 j + 0, 1] in the first row, score[4 j + 2, 3] in the second.
#pragma once

#include "backends/cuda/sm90/arithmetic.cuh"

namespace fovea::cuda {

/// Of four lanes that share rows.
__device__ __forceinline__ float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

/// Lane c of each four ends with words c of all four, in order of lanes.
__device__ __forceinline__ void transpose_in_quad(std::uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const std::uint32_t given = upper ? words[i] : words[i + step];
      const std::uint32_t taken = __shfl_xor_sync(~0u, given, step);
      if (upper) {
        words[i] = taken;
      } else {
        words[i + step] = taken;
      }
    }
  }
}

/// The keys that a thread's two rows see, counted from the first key of a tile.
struct RowKeys {
  std::int32_t begin[2], end[2];
};

/// Scores of keys that a row does not see become -inf.
template <int kKeys>
__device__ __forceinline__ void mask(float (&score)[kKeys / 2], const RowKeys& keys) {
  const int column = threadIdx.x % 4 * 2;
  const std::int32_t begin0 = keys.begin[0] - column, end0 = keys.end[0] - column;
  const std::int32_t begin1 = keys.begin[1] - column, end1 = keys.end[1] - column;
  // Most tiles have hidden keys on one side only.
  if (__any_sync(~0u, keys.begin[0] > 0 || keys.begin[1] > 0)) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (i / 4 * 8 + i % 2 < (i / 2 % 2 == 0 ? begin0 : begin1)) score[i] = -INFINITY;
    }
  }
  if (__any_sync(~0u, keys.end[0] < kKeys || keys.end[1] < kKeys)) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (i / 4 * 8 + i % 2 >= (i / 2 % 2 == 0 ? end0 : end1)) score[i] = -INFINITY;
    }
  }
}

/// The same by bits: bit i of seen[r] is key i of the thread's row r.
template <int kKeys, typename Bits>
__device__ __forceinline__ void mask_unseen(float (&score)[kKeys / 2], const Bits (&seen)[2]) {
  const int column = threadIdx.x % 4 * 2;
  const Bits of_lane[2] = {seen[0] >> column, seen[1] >> column};
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    if ((of_lane[i / 2 % 2] >> (i / 4 * 8 + i % 2) & 1) == 0) score[i] = -INFINITY;
  }
}

/// Scaled scores s become cap * tanh(s / cap), in log2 units.
template <int kKeys>
__device__ __forceinline__ void cap_scores(float (&score)[kKeys / 2], float sm_scale, float cap) {
  const float twice = 2.f * kLog2e * sm_scale / cap;
  const float cap_log2 = cap * kLog2e;
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    // tanh(x) = 1 - 2 / (e^2x + 1): right to a few units of 1, which is what counts here.
    const float e = exp2_approx(score[i] * twice);
    score[i] = cap_log2 - __fdividef(2.f * cap_log2, e + 1.f);
  }
}

/// Of a thread's two rows. Everything is relative to a reference in log2 units: the largest score
/// so far, up to the rounding of its scaling.
struct Softmax {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};  ///< Over the thread's keys.

  /// Products beyond this are rounded before the reference is taken off: their rounding error
  /// would be worth whole powers of two.
  static constexpr float kLarge = 1 << 20;

  /// Scores (times scale: log2 units) become weights. Returns what earlier sums and outputs are
  /// multiplied by.
  template <int kKeys>
  __device__ __forceinline__ float2 weigh(float (&score)[kKeys / 2], float scale) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      top[0] = fmaxf(top[0], fmaxf(score[4 * j], score[4 * j + 1]));
      top[1] = fmaxf(top[1], fmaxf(score[4 * j + 2], score[4 * j + 3]));
    }
    float scales[2] = {scale, scale};
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = max_of_quad(top[r]) * scale;
    const bool large[2] = {top[0] != -INFINITY && fabsf(top[0]) > kLarge,
                           top[1] != -INFINITY && fabsf(top[1]) > kLarge};
    if (__any_sync(~0u, large[0] || large[1])) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if (large[i / 2 % 2]) score[i] *= scale;
      }
      for (int r = 0; r < 2; ++r) scales[r] = large[r] ? 1.f : scale;
    }
    float base[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = max[r];
      max[r] = fmaxf(before, top[r]);
      base[r] = max[r] == -INFINITY ? 0.f : max[r];  // Nothing is visible yet.
      factor[r] = exp2_approx(before - base[r]);
    }
    float added[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      constexpr int kPair = 2;
      const int r = i / kPair % 2;
      score[i] = exp2_approx(fmaf(score[i], scales[r], -base[r]));
      added[r] += score[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + added[r];
    return {factor[0], factor[1]};
  }
};

}  // namespace fovea::cuda
