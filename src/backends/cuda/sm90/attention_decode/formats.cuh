// How heads of blocks are stored, and how codes become bf16: exactly, as all of them are. Scales
// are for scores and weights.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fovea::cuda::decode {

/// Elements of the compute dtype.
struct DenseHeads {
  static constexpr bool kQuantized = false;
  static constexpr int kBits = 16;
  static constexpr int kScaleBytes = 0;
  static constexpr int kCopy = 16;  ///< Bytes of a copy.
};

/// a - b, two bf16 each.
__device__ __forceinline__ std::uint32_t subtract_bf16(std::uint32_t a, std::uint32_t b) {
  const __nv_bfloat162 d = __hsub2(reinterpret_cast<const __nv_bfloat162&>(a),
                                   reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const std::uint32_t&>(d);
}

struct Int8Heads {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 8;  ///< Two floats behind the codes: of each half of a head.
  static constexpr int kCopy = 8;

  /// Codes in bytes 0 and 2. 0x4300 + x is 128 + x in bf16: a code's low bits, less its sign's.
  static __device__ __forceinline__ std::uint32_t convert_pair(std::uint32_t codes) {
    return subtract_bf16((codes & 0x007f007f) | 0x43004300, (codes & 0x00800080) | 0x43004300);
  }
  /// 8 codes as 8 bf16.
  static __device__ __forceinline__ uint4 convert(const std::uint8_t* codes) {
    const auto w = *reinterpret_cast<const uint2*>(codes);
    return {convert_pair(__byte_perm(w.x, 0, 0x4140)), convert_pair(__byte_perm(w.x, 0, 0x4342)),
            convert_pair(__byte_perm(w.y, 0, 0x4140)), convert_pair(__byte_perm(w.y, 0, 0x4342))};
  }
};

struct Fp8Heads {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 0;  ///< One scale for the tensor.
  static constexpr int kCopy = 8;

  static __device__ __forceinline__ std::uint32_t convert_pair(std::uint32_t codes) {
    std::uint32_t halves;
    asm("{\n"
        ".reg .b16 a, b;\n"
        "mov.b32 {a, b}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "}\n"
        : "=r"(halves)
        : "r"(codes));
    const float2 wide = __half22float2(reinterpret_cast<const __half2&>(halves));
    const __nv_bfloat162 v = __floats2bfloat162_rn(wide.x, wide.y);
    return reinterpret_cast<const std::uint32_t&>(v);
  }
  static __device__ __forceinline__ uint4 convert(const std::uint8_t* codes) {
    const auto w = *reinterpret_cast<const uint2*>(codes);
    return {convert_pair(w.x), convert_pair(w.x >> 16), convert_pair(w.y),
            convert_pair(w.y >> 16)};
  }
};

/// The even channel's code in the low half of a byte.
struct Int4Heads {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 4;
  static constexpr int kScaleBytes = 8;
  static constexpr int kCopy = 8;

  /// The two codes of a byte. 0x4300 + u is 128 + u, for codes u - 8.
  static __device__ __forceinline__ std::uint32_t convert_pair(std::uint32_t byte) {
    return subtract_bf16((byte * 0x1001 & 0x000f000f) ^ 0x43084308, 0x43084308);
  }
  static __device__ __forceinline__ uint4 convert(const std::uint8_t* codes) {
    const auto w = *reinterpret_cast<const std::uint32_t*>(codes);
    return {convert_pair(w & 0xff), convert_pair(w >> 8 & 0xff), convert_pair(w >> 16 & 0xff),
            convert_pair(w >> 24)};
  }
};

}  // namespace fovea::cuda::decode
