// How heads of blocks are stored, and how codes become bf16: exactly, as all of them are, but for a
// power of two. Scales are for scores and weights.
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
// convert(): a word is two elements; pairs[i] becomes code i of both, over kUnit.

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

struct Int8Heads {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 8;  ///< Two floats behind the codes: of each half of a head.
  static constexpr int kCopy = 8;        ///< Heads are 8 bytes more than a multiple of 16.
  static constexpr int kInterleave = 2;
  static constexpr float kUnit = 64.f;  ///< 2^127 is the largest factor: 2^(133 - 127) is left.

  static __device__ __forceinline__ void convert(std::uint32_t word, std::uint32_t (&pairs)[2]) {
    constexpr std::uint32_t kMinus2 = 0xc000c000;  // -128 / kUnit
    word ^= 0x80808080;  // code + 128
    pairs[0] = scale_bf16<127>(__byte_perm(word, 0, 0x4240), kMinus2);
    pairs[1] = scale_bf16<127>(__byte_perm(word, 0, 0x4341), kMinus2);
  }
};

struct Fp8Heads {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 0;  ///< One scale for the tensor.
  static constexpr int kCopy = 16;
  static constexpr int kInterleave = 2;
  static constexpr float kUnit = 1.f;

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
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 wide = __half22float2(reinterpret_cast<const __half2&>(halves[i]));
      pairs[i] = pack<__nv_bfloat16>(wide.x, wide.y);
    }
  }
};

/// The even channel's code in the low half of a byte.
struct Int4Heads {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 4;
  static constexpr int kScaleBytes = 8;
  static constexpr int kCopy = 8;
  static constexpr int kInterleave = 4;
  static constexpr float kUnit = 64.f;

  static __device__ __forceinline__ void convert(std::uint32_t word, std::uint32_t (&pairs)[4]) {
    constexpr std::uint32_t kMinusEighth = 0xbe00be00;  // -8 / kUnit
    word ^= 0x88888888;                                 // code + 8
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const std::uint32_t codes = word >> (4 * i);
      pairs[i] = scale_bf16<127>(codes & 0x000f000f, kMinusEighth);
      pairs[i + 1] = scale_bf16<123>(codes & 0x00f000f0, kMinusEighth);  // Of 16 times the code.
    }
  }
};

}  // namespace fovea::cuda::decode
