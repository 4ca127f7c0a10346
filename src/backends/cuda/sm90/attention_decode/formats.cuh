// How heads of blocks are stored, and how codes become elements of a compute dtype: exactly, as all
// of them are, but for a power of two. Scales are for scores and weights.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "backends/cuda/sm90/arithmetic.cuh"

namespace fovea::cuda::decode {

/// Elements of the compute dtype.
struct DenseHeads {
  static constexpr bool kQuantized = false;
  static constexpr int kBits = 16;
  static constexpr int kScaleBytes = 0;
  static constexpr int kCopy = 16;  ///< Bytes of a copy.
  static constexpr int kInterleave = 1;
};

// Codes travel to registers as matrices of 16-bit elements do, kInterleave codes in each: so tile i
// of kInterleave neighbouring tiles of 8 has channels kInterleave * n + i for n from 0 to 7.
// convert<T>(): a word is two elements; pairs[i] becomes code i of both, over kUnit<T>.

/// word * 2^exponent - offset of bf16 pairs, rounded once. A small integer u in 16 bits, taken for
/// a bf16, is u * 2^-133: in the subnormals and in the numbers next to them.
template <int exponent>
__device__ __forceinline__ std::uint32_t scale_bf16(std::uint32_t word, std::uint32_t minus) {
  constexpr std::uint32_t kBf16 = (exponent + 127) << 7;
  std::uint32_t scaled;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(scaled)
      : "r"(word), "r"(kBf16 << 16 | kBf16), "r"(minus));
  return scaled;
}

/// word * factor + offset of f16 pairs. A small integer u in the low bits of 1024 is 1024 + u.
__device__ __forceinline__ std::uint32_t scale_f16(std::uint32_t word, std::uint32_t factor,
                                                   std::uint32_t offset) {
  std::uint32_t scaled;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(scaled) : "r"(word), "r"(factor), "r"(offset));
  return scaled;
}
constexpr std::uint32_t kF16Of1024 = 0x64006400;

/// Of integers in bf16: 2^127 is the largest factor, so that 2^(133 - 127) is left.
template <typename T>
constexpr float kUnitOfIntegers = std::is_same_v<T, __half> ? 1.f : 64.f;

struct Int8Heads {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 8;  ///< Two floats behind the codes: of each half of a head.
  static constexpr int kCopy = 8;        ///< Heads are 8 bytes more than a multiple of 16.
  static constexpr int kInterleave = 2;
  static constexpr bool kMayNotBeFinite = false;
  template <typename T>
  static constexpr float kUnit = kUnitOfIntegers<T>;

  template <typename T>
  static __device__ __forceinline__ void convert(std::uint32_t word, std::uint32_t (&pairs)[2]) {
    word ^= 0x80808080;  // code + 128
    const std::uint32_t codes[2] = {__byte_perm(word, 0, 0x4240), __byte_perm(word, 0, 0x4341)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        pairs[i] = scale_f16(codes[i] | kF16Of1024, 0x3c003c00, 0xe480e480);  // * 1 - 1152
      } else {
        pairs[i] = scale_bf16<127>(codes[i], 0xc000c000);  // -128 / kUnit
      }
    }
  }
};

/// Pairs of f16 to those of T.
template <typename T>
__device__ __forceinline__ void widen(const std::uint32_t (&halves)[2], std::uint32_t (&pairs)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (std::is_same_v<T, __half>) {
      pairs[i] = halves[i];
    } else {
      const float2 wide = __half22float2(reinterpret_cast<const __half2&>(halves[i]));
      pairs[i] = pack<T>(wide.x, wide.y);
    }
  }
}

struct Fp8E4m3Heads {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 0;  ///< One scale for the tensor.
  static constexpr int kCopy = 16;
  static constexpr int kInterleave = 2;
  static constexpr bool kMayNotBeFinite = true;
  template <typename T>
  static constexpr float kUnit = 1.f;

  template <typename T>
  static __device__ __forceinline__ void convert(std::uint32_t word, std::uint32_t (&pairs)[2]) {
    const std::uint32_t codes = __byte_perm(word, 0, 0x3120);
    std::uint32_t halves[2];
    asm("{\n"
        ".reg .b16 a, b;\n"
        "mov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n"
        "}\n"
        : "=r"(halves[0]), "=r"(halves[1])
        : "r"(codes));
    widen<T>(halves, pairs);
  }
  /// The highest bit of each code that is not finite; else 0.
  static __device__ __forceinline__ std::uint32_t not_finite(std::uint32_t word) {
    return ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
  }
  /// Of a code that is not finite.
  static __device__ __forceinline__ float value(std::uint32_t) { return NAN; }
};

/// The same with scales as Int8Heads has them.
struct Fp8PerTokenHeads : Fp8E4m3Heads {
  static constexpr int kScaleBytes = 8;
  static constexpr int kCopy = 8;
};

/// The high bytes of f16.
struct Fp8E5m2Heads : Fp8E4m3Heads {
  template <typename T>
  static __device__ __forceinline__ void convert(std::uint32_t word, std::uint32_t (&pairs)[2]) {
    const std::uint32_t halves[2] = {__byte_perm(word, 0, 0x2404), __byte_perm(word, 0, 0x3414)};
    widen<T>(halves, pairs);
  }
  static __device__ __forceinline__ std::uint32_t not_finite(std::uint32_t word) {
    return ((word & 0x7f7f7f7f) + 0x04040404) & 0x80808080;
  }
  static __device__ __forceinline__ float value(std::uint32_t code) {
    const auto bits = static_cast<std::uint16_t>(code << 8);
    return __half2float(reinterpret_cast<const __half&>(bits));
  }
};

/// The even channel's code in the low half of a byte.
struct Int4Heads {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 4;
  static constexpr int kScaleBytes = 8;
  static constexpr int kCopy = 8;
  static constexpr int kInterleave = 4;
  static constexpr bool kMayNotBeFinite = false;
  template <typename T>
  static constexpr float kUnit = kUnitOfIntegers<T>;

  template <typename T>
  static __device__ __forceinline__ void convert(std::uint32_t word, std::uint32_t (&pairs)[4]) {
    word ^= 0x88888888;  // code + 8
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const std::uint32_t codes = word >> (4 * i);
      const std::uint32_t low = codes & 0x000f000f;
      const std::uint32_t high = codes & 0x00f000f0;  // 16 times the code.
      if constexpr (std::is_same_v<T, __half>) {
        pairs[i] = scale_f16(low | kF16Of1024, 0x3c003c00, 0xe408e408);       // * 1 - 1032
        pairs[i + 1] = scale_f16(high | kF16Of1024, 0x2c002c00, 0xd480d480);  // / 16 - 72
      } else {
        constexpr std::uint32_t kMinusEighth = 0xbe00be00;  // -8 / kUnit
        pairs[i] = scale_bf16<127>(low, kMinusEighth);
        pairs[i + 1] = scale_bf16<123>(high, kMinusEighth);
      }
    }
  }
};

}  // namespace fovea::cuda::decode
