// Scalar arithmetic that the kernels of this chip share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fovea::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// 2^x, 2 units off at most; -inf gives 0, NaN stays.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(v);
  } else {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(v);
  }
}

}  // namespace fovea::cuda
