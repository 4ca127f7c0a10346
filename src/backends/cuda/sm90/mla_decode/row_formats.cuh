// Quantised cache rows: where codes and scales lie, and how codes become f16 fragments of the
// tensor cores' A operand. All codes are exact in f16.
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/mla_decode/params.h"

namespace fovea::cuda::mla {

__device__ __forceinline__ std::uint32_t halves_minus(std::uint32_t halves,
                                                      std::uint32_t constant) {
  std::uint32_t out;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(halves), "r"(constant));
  return out;
}

/// Rows of one byte a channel.
struct ByteRows {
  static constexpr int kChunkRowBytes = 64;
  /// A word is 4 channels; a warp's 8 lane groups take 32 channels, in two M tiles each.
  static constexpr int kTilesPerWord = 2;

  /// K position, within a chunk of 64, of channel x of it: a lane reads 16 channels side by side.
  static __device__ int position(int x) {
    const int c = x / 16, step = x % 16 / 4, e = x % 4;
    return step * 16 + e / 2 * 8 + 2 * c + e % 2;
  }
  /// Channel of M row g of the warpgroup's chunk `chunk`; row g + 8 is the next one.
  static __device__ int channel(int chunk, int warp, int g) {
    return chunk / 2 * 128 + warp * 32 + g * 4 + chunk % 2 * 2;
  }
};

/// Bytes 0 to 3 of a word as f16: low gets 0 and 1, high 2 and 3.
struct Int8Codes {
  static __device__ void convert(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
    // 0x6400 + u is 1024 + u in f16, for bytes u = code + 128.
    const std::uint32_t biased = word ^ 0x80808080;
    low = halves_minus(__byte_perm(biased, 0x64646464, 0x4140), 0x64806480);
    high = halves_minus(__byte_perm(biased, 0x64646464, 0x4342), 0x64806480);
  }
};

struct E4m3Codes {
  static __device__ void convert(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
    asm("{\n"
        ".reg .b16 a, b;\n"
        "mov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n"
        "}\n"
        : "=r"(low), "=r"(high)
        : "r"(word));
  }
};

template <typename Codes>
struct ByteFormat : ByteRows {
  static constexpr int kChunkWords = 4;  ///< A lane's of a key's chunk: 16 channels.

  static __device__ void load_words(const std::uint8_t* row, int c,
                                    std::uint32_t (&word)[kChunkWords]) {
    const auto low = *reinterpret_cast<const uint2*>(row + c * 16);
    const auto high = *reinterpret_cast<const uint2*>(row + c * 16 + 8);
    word[0] = low.x, word[1] = low.y, word[2] = high.x, word[3] = high.y;
  }
  /// A operands of 4 k16 steps from one lane's words of two keys.
  static __device__ void score_operands(const std::uint32_t (&word)[2][kChunkWords],
                                        std::uint32_t (&a)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Codes::convert(word[0][step], a[step][0], a[step][2]);
      Codes::convert(word[1][step], a[step][1], a[step][3]);
    }
  }
  /// A operands of two M tiles from the words of 4 keys: [channel][key] out of [key][channel].
  static __device__ void value_operands(const std::uint32_t (&key)[4],
                                        std::uint32_t (&a)[kTilesPerWord][4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int selector = tile == 0 ? 0x5140 : 0x7362;
      Codes::convert(__byte_perm(key[0], key[1], selector), a[tile][0], a[tile][1]);
      Codes::convert(__byte_perm(key[2], key[3], selector), a[tile][2], a[tile][3]);
    }
  }
};

struct Int8PerToken : ByteFormat<Int8Codes> {
  static constexpr int kRowBytes = 584;
  static constexpr int kScales = 576;  ///< Where the pair of scales lies; 0: none.
  static constexpr bool kMayBeNan = false;
  /// Key of a warp's 16 that stands at place i of lane group c. Rows are 18 banks apart, modulo 32:
  /// four rows further is 8 banks, so that 8 words of each of 4 keys are 32 banks.
  static __device__ constexpr int key(int c, int i) { return 4 * c + i; }
};

struct Fp8E4m3 : ByteFormat<E4m3Codes> {
  static constexpr int kRowBytes = 576;
  static constexpr int kScales = 0;
  static constexpr bool kMayBeNan = true;
  /// Rows are 16 banks apart: two of four keys meet in a bank, the least there can be.
  static __device__ constexpr int key(int c, int i) { return c + 4 * i; }
};

struct Int4PerToken {
  static constexpr int kRowBytes = 296;
  static constexpr int kScales = 288;
  static constexpr bool kMayBeNan = false;
  static constexpr int kChunkRowBytes = 32;
  static constexpr int kTilesPerWord = 4;  ///< A word is 8 channels, a warp takes 64.
  /// Rows are 10 banks apart; as Int8PerToken.
  static __device__ constexpr int key(int c, int i) { return 4 * c + i; }

  static __device__ int position(int x) {
    const int c = x / 16, y = x % 16, i = y % 4, half = y % 8 / 4;
    return (y / 8 * 2 + i / 2) * 16 + i % 2 * 8 + 2 * c + half;
  }
  static __device__ int channel(int chunk, int warp, int g) {
    return chunk / 4 * 256 + warp * 64 + g * 8 + chunk % 4 * 2;
  }
  static constexpr int kChunkWords = 2;  ///< A lane's of a key's chunk: 16 channels.

  /// Nibble i of both halves as f16. Even nibbles of a byte: 0x6400 + u is 1024 + u, for nibbles
  /// u = code + 8. Odd ones stay where they are: 0x6400 + 16 u is 1024 + 16 u.
  static __device__ std::uint32_t convert(std::uint32_t halves, int i) {
    const std::uint32_t bytes = i < 2 ? halves : halves >> 8;
    if (i % 2 == 0) return halves_minus((bytes & 0x000f000f) ^ 0x64086408, 0x64086408);
    std::uint32_t out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;"  // times 1 / 16, less 72
        : "=r"(out)
        : "r"((bytes & 0x00f000f0) ^ 0x64806480), "r"(0x2c002c00), "r"(0xd480d480));
    return out;
  }
  static __device__ void load_words(const std::uint8_t* row, int c,
                                    std::uint32_t (&word)[kChunkWords]) {
    const auto v = *reinterpret_cast<const uint2*>(row + c * 8);
    word[0] = v.x, word[1] = v.y;
  }
  static __device__ void score_operands(const std::uint32_t (&word)[2][kChunkWords],
                                        std::uint32_t (&a)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        a[step][n] = convert(word[n % 2][step / 2], step % 2 * 2 + n / 2);
      }
    }
  }
  static __device__ void value_operands(const std::uint32_t (&key)[4],
                                        std::uint32_t (&a)[kTilesPerWord][4]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const std::uint32_t low = __byte_perm(key[2 * pair], key[2 * pair + 1], 0x5410);
      const std::uint32_t high = __byte_perm(key[2 * pair], key[2 * pair + 1], 0x7632);
#pragma unroll
      for (int n = 0; n < 8; ++n) a[n / 2][2 * pair + n % 2] = convert(n < 4 ? low : high, n % 4);
    }
  }
};

}  // namespace fovea::cuda::mla
