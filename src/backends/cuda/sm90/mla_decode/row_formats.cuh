// Quantised cache rows: where codes and scales lie, and how codes become f16 fragments of the
// tensor cores' A operand. All codes are exact in f16.
//
// A product takes 16 keys of a tile at a time, those of a k16 step of O. Which key stands at which
// place of an operand, and which channels a lane reads, is free as long as queries, P and outputs
// agree; the orders here make every access to raw rows free of bank conflicts, but for the values
// of PerTensor.
//
// Integer codes stay integers for scores, where queries are integers of two digits. For outputs
// they keep their bits and become subnormal f16, 2^-24 times an unsigned number: one instruction
// for two of them. That number is the code and an offset, which is taken off the sums: kLowOffset
// for the low 8 keys of a k16 step and kHighOffset, negative, for the high ones. Sums stay about as
// small as those of the codes, and f32 loses nothing by the offsets.
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

/// (word & mask) ^ flip, in one instruction.
__device__ __forceinline__ std::uint32_t masked_xor(std::uint32_t word, std::uint32_t mask,
                                                    std::uint32_t flip) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(word), "r"(mask), "r"(flip));
  return out;
}

/// `count` words from an address that is a multiple of kAlignment.
template <int kAlignment, int count>
__device__ __forceinline__ void load_words(const std::uint8_t* from,
                                           std::uint32_t (&word)[count]) {
#pragma unroll
  for (int i = 0; i < count; i += kAlignment / 4) {
    if constexpr (kAlignment == 16) {
      const auto v = *reinterpret_cast<const uint4*>(from + 4 * i);
      word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
    } else if constexpr (kAlignment == 8 && count > 1) {
      const auto v = *reinterpret_cast<const uint2*>(from + 4 * i);
      word[i] = v.x, word[i + 1] = v.y;
    } else {
      word[i] = *reinterpret_cast<const std::uint32_t*>(from + 4 * i);
    }
  }
}

/// Conversions of a word's four bytes to f16. `of_key`: channels of a key, for scores.
/// `of_channels`: two channels of each of two keys side by side, for outputs, where `is_high` tells
/// the high keys of a k16 step.
struct Int8Codes {
  static constexpr float kUnit = 0x1p24f;  ///< What sums of outputs are multiplied by.
  static constexpr float kLowOffset = 128.f, kHighOffset = -127.f;
  /// The bits that are all set in a code that is not finite; 0: there is none.
  static constexpr std::uint32_t kNotFinite = 0;

  /// Selectors of two keys' first and last two channels as of_channels takes them.
  static constexpr int kFirstPair = 0x5410, kSecondPair = 0x7632;
  static __device__ void of_channels(std::uint32_t word, bool is_high, std::uint32_t& first,
                                     std::uint32_t& second) {
    // u = code + 128, or -(255 - u) = code - 127.
    const std::uint32_t flip = is_high ? 0x807f807f : 0x00800080;
    first = masked_xor(word, 0x00ff00ff, flip);
    second = masked_xor(word >> 8, 0x00ff00ff, flip);
  }
};

struct E4m3Codes {
  static constexpr float kUnit = 1.f;
  static constexpr float kLowOffset = 0.f, kHighOffset = 0.f;
  static constexpr std::uint32_t kNotFinite = 0x7f;

  /// K position of byte e of lane c's word.
  static __device__ int position(int c, int e) { return e / 2 * 8 + 2 * c + e % 2; }
  static constexpr int kFirstPair = 0x5140, kSecondPair = 0x7362;
  static __device__ void of_key(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
    asm("{\n"
        ".reg .b16 a, b;\n"
        "mov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n"
        "}\n"
        : "=r"(low), "=r"(high)
        : "r"(word));
  }
  static __device__ void of_channels(std::uint32_t word, bool, std::uint32_t& first,
                                     std::uint32_t& second) {
    of_key(word, first, second);
  }
};

/// The high bytes of f16.
struct E5m2Codes {
  static constexpr float kUnit = 1.f;
  static constexpr float kLowOffset = 0.f, kHighOffset = 0.f;
  static constexpr std::uint32_t kNotFinite = 0x7c;

  static __device__ int position(int c, int e) { return e % 2 * 8 + 2 * c + e / 2; }
  static constexpr int kFirstPair = Int8Codes::kFirstPair, kSecondPair = Int8Codes::kSecondPair;
  static __device__ void of_key(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
    low = word << 8 & 0xff00ff00;
    high = word & 0xff00ff00;
  }
  static __device__ void of_channels(std::uint32_t word, bool, std::uint32_t& first,
                                     std::uint32_t& second) {
    of_key(word, first, second);
  }
};

/// Latents of one byte a channel. Rows begin at multiples of kAlign bytes.
template <typename Codes, int kAlign>
struct ByteLatents {
  /// Key tiles that a team takes at a time. The ring has no room for two of these for each team.
  static constexpr int kStepTiles = 1;
  /// The first key of a tile's k16 step of O, which is of a warp for S.
  static __device__ int first_key(int step) { return step * 16; }
  static constexpr std::uint32_t kNotFinite = Codes::kNotFinite;
  static constexpr int kAlignment = kAlign;
  static constexpr float kUnit = Codes::kUnit;
  static constexpr bool kIntegers = false;  ///< Scores are sums of integers.
  static constexpr float kLowOffset = Codes::kLowOffset, kHighOffset = Codes::kHighOffset;
  /// What sums of the second of two neighbouring output channels are multiplied by besides.
  static constexpr float kSecondUnit = 1.f;
  /// A lane reads 16 channels side by side of each chunk of a key.
  static constexpr int kChunkWords = 4;
  /// A lane takes two words of values of a key at a time, which are kTilesPerWord M tiles each.
  static constexpr int kTilesPerWord = 2;

  /// K position of channel x of a chunk of 64 latent channels.
  static __device__ int latent_position(int x) {
    return x % 16 / 4 * 16 + Codes::position(x / 16, x % 4);
  }
  /// Where lane c's latents begin in a row.
  static __device__ int latent_byte(int c) { return c * 16; }
  static __device__ void load_latent(const std::uint8_t* from, int chunk,
                                     std::uint32_t (&word)[kChunkWords]) {
    load_words<kAlign>(from + chunk * 64, word);
  }
  /// A operand of k16 step `step` of one lane's words of two keys.
  template <int words>
  static __device__ void score_operand(const std::uint32_t (&word)[2][words], int step,
                                       std::uint32_t (&a)[4]) {
    Codes::of_key(word[0][step], a[0], a[2]);
    Codes::of_key(word[1][step], a[1], a[3]);
  }
  /// Channel of row g of M tile `tile` of warp `warp`'s values; row g + 8 is the next one.
  static __device__ int channel(int warp, int tile, int g) {
    return warp * 128 + tile / 4 * 64 + g * 8 + tile % 4 * 2;
  }
  /// Byte of a lane's first value words in a row.
  static __device__ int value_byte(int warp, int g) { return warp * 128 + g * 8; }
  /// A operands of two M tiles from the words of 4 keys: [channel][key] out of [key][channel].
  static __device__ void value_operands(const std::uint32_t (&key)[4],
                                        std::uint32_t (&a)[kTilesPerWord][4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int selector = tile == 0 ? Codes::kFirstPair : Codes::kSecondPair;
      Codes::of_channels(__byte_perm(key[0], key[1], selector), false, a[tile][0], a[tile][1]);
      Codes::of_channels(__byte_perm(key[2], key[3], selector), true, a[tile][2], a[tile][3]);
    }
  }
};

/// Rope channels of one byte each, behind the latents.
template <typename Codes, int kAlign>
struct ByteRows : ByteLatents<Codes, kAlign> {
  static constexpr int kRopeWords = 2;  ///< A lane reads 8 channels of each half of 32.
  static constexpr bool kBf16Rope = false;

  static __device__ int rope_position(int x) {
    return x / 32 * 32 + x % 8 / 4 * 16 + Codes::position(x % 32 / 8, x % 4);
  }
  static __device__ int rope_byte(int half, int c) { return 512 + half * 32 + c * 8; }
  static __device__ void load_rope(const std::uint8_t* from, std::uint32_t (&word)[kRopeWords]) {
    load_words<8>(from, word);
  }
  static __device__ void rope_operand(const std::uint32_t (&word)[2][kRopeWords], int step,
                                      std::uint32_t (&a)[4]) {
    ByteLatents<Codes, kAlign>::score_operand(word, step, a);
  }
};

/// Two scales behind the codes: of the latent and of the rope channels.
template <typename Codes>
struct PerToken : ByteRows<Codes, 8> {
  static constexpr int kRowBytes = 584;
  static constexpr bool kKeyScales = true;
  static constexpr int kGroups = 1;
  /// The keys, of a step's 16, at places 2 c + e and, kHighKey further on, 2 c + e + 8.
  /// From e = 0 to 1 it is kNextKey, 0 if that depends on c.
  /// Rows are 18 banks apart, modulo 32.
  static constexpr int kHighKey = 2;
  static constexpr int kNextKey = 1;
  static __device__ int key(int c, int e) { return c % 2 * 8 + c / 2 * 4 + e; }
  static __device__ float latent_scale(const std::uint8_t* row, int) {
    return *reinterpret_cast<const float*>(row + 576);
  }
  static __device__ float rope_scale(const std::uint8_t* row) {
    return *reinterpret_cast<const float*>(row + 580);
  }
};
using Fp8PerToken = PerToken<E4m3Codes>;

struct Int8PerToken : PerToken<Int8Codes> {
  /// Every other row begins 4 banks further on.
  static constexpr int kHighKey = 1;
  static constexpr int kNextKey = 2;
  static __device__ int key(int c, int e) { return c * 4 + e * 2; }

  static constexpr bool kIntegers = true;
  static constexpr float kScoreUnit = 1.f;  ///< What sums of scores are multiplied by.
  /// A lane reads a word of each 16 channels of a chunk of a key, the rope channels being the last
  /// chunk. Words of the next chunk arrive while products take those of this one as they are.
  static constexpr int kChunkBytes = 64, kChunkWords = 4, kChunksAtOnce = 2;
  static __device__ int latent_byte(int c) { return c * 4; }
  static __device__ void load_chunk(const std::uint8_t* from, std::uint32_t (&word)[kChunkWords]) {
#pragma unroll
    for (int i = 0; i < kChunkWords; ++i) {
      word[i] = *reinterpret_cast<const std::uint32_t*>(from + i * 16);
    }
  }
  /// K position of channel x of a chunk.
  static __device__ int position(int x) { return x; }
  /// A operand of k32 step `step` of a chunk from one lane's words of two keys.
  static __device__ void score_operand(const std::uint32_t (&word)[2][kChunkWords], int step,
                                       std::uint32_t (&a)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) a[n] = word[n % 2][step * 2 + n / 2];
  }
};


/// One scale for the tensor.
template <typename Codes>
struct PerTensor : ByteRows<Codes, 16> {
  static constexpr int kRowBytes = 576;
  static constexpr bool kKeyScales = false;
  static constexpr int kGroups = 1;
  /// Rows are 16 banks apart: values of two of four keys meet in a bank, the least there can be.
  static constexpr int kHighKey = 8;
  static constexpr int kNextKey = 0;
  static __device__ int key(int c, int e) { return e * 4 + (c ^ e); }
};
using Fp8E4m3 = PerTensor<E4m3Codes>;
using Fp8E5m2 = PerTensor<E5m2Codes>;

struct Fp8DsMla : ByteLatents<E4m3Codes, 16> {
  static constexpr int kRowBytes = 656;
  static constexpr bool kKeyScales = true;
  static constexpr int kGroups = 4;
  /// Rows are 4 banks apart.
  static constexpr int kHighKey = 1;
  static constexpr int kNextKey = 0;
  static __device__ int key(int c, int e) { return e * 8 + (2 * c + 4 * e) % 8; }
  static __device__ float latent_scale(const std::uint8_t* row, int group) {
    return reinterpret_cast<const float*>(row + 512)[group];
  }

  static constexpr int kRopeWords = 4;  ///< As ByteRows, two bytes a channel.
  static constexpr bool kBf16Rope = true;
  static __device__ int rope_position(int x) {
    const int half = x / 32, c = x % 32 / 8, e = x % 8;
    return half * 32 + e / 4 * 16 + e % 4 / 2 * 8 + 2 * c + e % 2;
  }
  static __device__ int rope_byte(int half, int c) { return 528 + half * 64 + c * 16; }
  static __device__ void load_rope(const std::uint8_t* from, std::uint32_t (&word)[kRopeWords]) {
    load_words<16>(from, word);
  }
  static __device__ void rope_operand(const std::uint32_t (&word)[2][kRopeWords], int step,
                                      std::uint32_t (&a)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) a[n] = word[n % 2][step * 2 + n / 2];
  }
};

struct Int4PerToken {
  static constexpr int kStepTiles = 2;
  static constexpr int kRowBytes = 296;
  static constexpr std::uint32_t kNotFinite = 0;
  static constexpr bool kKeyScales = true;
  static constexpr int kGroups = 1;
  /// Rows are 10 banks apart, modulo 32: every fourth one begins 8 banks further on. Lanes read 8
  /// bytes, half a warp at a time, of the four keys at places 0 to 3 or 4 to 7 (scores), or at the
  /// even or the odd ones (values).
  static constexpr int kHighKey = 1;
  static constexpr int kNextKey = 0;
  static __device__ int first_key(int step) { return step / 2 * 32 + step % 2 * 2; }
  static __device__ int key(int c, int e) { return 4 * ((2 * c + e) ^ c / 2); }
  static __device__ float latent_scale(const std::uint8_t* row, int) {
    return *reinterpret_cast<const float*>(row + 288);
  }
  static __device__ float rope_scale(const std::uint8_t* row) {
    return *reinterpret_cast<const float*>(row + 292);
  }

  static constexpr bool kIntegers = true;
  /// Codes stand in the upper half of a byte, signed.
  static constexpr float kScoreUnit = 0x1p-4f;
  /// A lane reads 16 channels side by side of each chunk of a key, the rope channels being the last
  /// one.
  static constexpr int kChunkBytes = 32, kChunkWords = 2, kChunksAtOnce = 1;
  static __device__ int latent_byte(int c) { return c * 8; }
  static __device__ void load_chunk(const std::uint8_t* from, std::uint32_t (&word)[kChunkWords]) {
    load_words<8>(from, word);
  }
  static __device__ int position(int x) {
    return x % 16 / 8 * 32 + x % 2 * 16 + x / 16 * 4 + x % 8 / 2;
  }
  static __device__ void score_operand(const std::uint32_t (&word)[2][kChunkWords], int step,
                                       std::uint32_t (&a)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const std::uint32_t w = word[n % 2][step];
      a[n] = (n < 2 ? w << 4 : w) & 0xf0f0f0f0;
    }
  }

  static constexpr int kTilesPerWord = 4;
  static constexpr float kUnit = 0x1p24f;
  static constexpr float kLowOffset = 8.f, kHighOffset = -7.f;
  /// Odd nibbles of a byte stay where they are: 16 times the code.
  static constexpr float kSecondUnit = 0x1p-4f;

  /// Nibble i of both halves: u = code + 8, or -(15 - u) = code - 7.
  static __device__ std::uint32_t convert(std::uint32_t halves, int i, bool is_high) {
    const std::uint32_t bytes = i < 2 ? halves : halves >> 8;
    return i % 2 == 0 ? masked_xor(bytes, 0x000f000f, is_high ? 0x80078007 : 0x00080008)
                      : masked_xor(bytes, 0x00f000f0, is_high ? 0x80708070 : 0x00800080);
  }
  static __device__ int channel(int warp, int tile, int g) {
    return warp * 128 + g * 16 + tile * 2;
  }
  static __device__ int value_byte(int warp, int g) { return warp * 64 + g * 8; }
  static __device__ void value_operands(const std::uint32_t (&key)[4],
                                        std::uint32_t (&a)[kTilesPerWord][4]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const std::uint32_t low = __byte_perm(key[2 * pair], key[2 * pair + 1], 0x5410);
      const std::uint32_t high = __byte_perm(key[2 * pair], key[2 * pair + 1], 0x7632);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        a[n / 2][2 * pair + n % 2] = convert(n < 4 ? low : high, n % 4, pair == 1);
      }
    }
  }
};

}  // namespace fovea::cuda::mla
