// Primitives for any processor: vectors of four, which the compiler maps to what it has.
#pragma once

#include <cstdint>

#include "fovea/dtype.h"

#define FOVEA_INLINE inline __attribute__((always_inline))

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef std::uint32_t Bits __attribute__((vector_size(16)));
typedef std::int32_t Mask __attribute__((vector_size(16)));

constexpr int kLanes = 4;
// Sixteen registers on x86-64, more elsewhere: 4 x 2 accumulators, two vectors, one broadcast.
constexpr int kQkTokens = 4;
constexpr int kQkVectors = 2;
constexpr int kPvRows = 4;
constexpr int kPvVectors = 2;
// 4 x 2, 2 x 4 or 1 x 8 accumulators, four vectors of Q and one of K.
constexpr int kDotSums = 8;

FOVEA_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
FOVEA_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
FOVEA_INLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
FOVEA_INLINE Vec add(Vec a, Vec b) { return a + b; }
FOVEA_INLINE Vec sub(Vec a, Vec b) { return a - b; }
FOVEA_INLINE Vec mul(Vec a, Vec b) { return a * b; }
FOVEA_INLINE Vec div(Vec a, Vec b) { return a / b; }
/// a * b + c; not fused here.
FOVEA_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
FOVEA_INLINE Mask less(Vec a, Vec b) { return a < b; }
FOVEA_INLINE Vec select(Mask mask, Vec a, Vec b) { return mask ? a : b; }
/// b where either is NaN.
FOVEA_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
/// To nearest even, |x| < 2^22.
FOVEA_INLINE Vec round(Vec x) {
  const Vec shift = broadcast(0x1.8p23f);
  return (x + shift) - shift;
}
/// x * 2^n for integral n in [-126, 127]. NaN when x is.
FOVEA_INLINE Vec scale_by_power(Vec x, Vec n) {
  // The sum's lowest bits are n + 127, the biased exponent of 2^n.
  const Bits biased = reinterpret_cast<Bits>(n + broadcast(0x1.8p23f + 127.f));
  return x * reinterpret_cast<Vec>(biased << 23);
}
FOVEA_INLINE float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

/// Integers, and pairs of int16, the first in the low half.
typedef std::int32_t IntVec __attribute__((vector_size(16)));
typedef std::int16_t IntPairs __attribute__((vector_size(16)));
FOVEA_INLINE IntVec broadcast_int(std::int32_t x) { return IntVec{x, x, x, x}; }
FOVEA_INLINE Vec to_f32(IntVec v) { return __builtin_convertvector(v, Vec); }
FOVEA_INLINE IntVec add(IntVec a, IntVec b) { return a + b; }
/// kWords int32 or pairs of int16, again and again.
template <int kWords>
FOVEA_INLINE IntPairs repeat_words(const void* p) {
  std::int32_t words[kLanes];
  for (int i = 0; i < kLanes; i += kWords) __builtin_memcpy(words + i, p, kWords * sizeof words[0]);
  IntPairs repeated;
  __builtin_memcpy(&repeated, words, sizeof repeated);
  return repeated;
}
FOVEA_INLINE IntPairs load_int_pairs(const std::int8_t* p) {
  IntPairs v;
  for (int i = 0; i < 2 * kLanes; ++i) v[i] = p[i];
  return v;
}
/// sum + a.first * b.first + a.second * b.second
FOVEA_INLINE IntVec dot_int_pairs(IntVec sum, IntPairs a, IntPairs b) {
  for (int i = 0; i < kLanes; ++i) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return sum;
}

/// For score_digits-inl.h: sum + a[0] * b[0] + ... + a[3] * b[3] in each lane, of unsigned bytes a
/// and signed ones b, modulo 2^32.
FOVEA_INLINE IntVec dot_bytes(IntVec sum, IntVec a, IntVec b) {
  std::uint8_t of_a[4 * kLanes];
  std::int8_t of_b[4 * kLanes];
  __builtin_memcpy(of_a, &a, sizeof of_a);
  __builtin_memcpy(of_b, &b, sizeof of_b);
  for (int i = 0; i < 4 * kLanes; ++i) {
    sum[i / 4] = static_cast<std::int32_t>(static_cast<std::uint32_t>(sum[i / 4]) +
                                           static_cast<std::uint32_t>(of_a[i] * of_b[i]));
  }
  return sum;
}

/// Lane i: the sum of the lanes of v[i], in one order for all.
FOVEA_INLINE Vec sums_of_lanes(const Vec (&v)[kLanes]) {
  const Vec low = Vec{v[0][0], v[1][0], v[2][0], v[3][0]} + Vec{v[0][2], v[1][2], v[2][2], v[3][2]};
  const Vec high =
      Vec{v[0][1], v[1][1], v[2][1], v[3][1]} + Vec{v[0][3], v[1][3], v[2][3], v[3][3]};
  return low + high;
}
FOVEA_INLINE float to_f32(BFloat16 x) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(x.bits) << 16);
}
FOVEA_INLINE float to_f32(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
  if ((x.bits & 0x7c00u) == 0x7c00u) {
    return __builtin_bit_cast(float, sign | magnitude | 0x7f800000u);
  }
  // The biases differ by 112; the product also normalises what is subnormal in f16.
  const float scaled = __builtin_bit_cast(float, magnitude) * 0x1p112f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, scaled));
}
FOVEA_INLINE float to_f32(std::int8_t x) { return x; }
/// The upper byte of an f16.
FOVEA_INLINE float to_f32(Float8E5M2 x) {
  return to_f32(Float16{static_cast<std::uint16_t>(x.bits << 8)});
}
/// As f16 bits with the same exponent field: 2^-8 of the value, since the biases differ by 8.
FOVEA_INLINE float to_f32(Float8E4M3FN x) {
  if ((x.bits & 0x7fu) == 0x7fu) return __builtin_nanf("");
  const unsigned half = (x.bits & 0x80u) << 8 | (x.bits & 0x7fu) << 7;
  return to_f32(Float16{static_cast<std::uint16_t>(half)}) * 256.f;
}
FOVEA_INLINE void round_to(BFloat16& to, float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const bool is_nan = x != x;
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  to.bits = static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded >> 16);
}
FOVEA_INLINE void round_to(Float16& to, float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity.
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // Subnormal in f16: a sum near 0.5 has ulp 2^-24.
    const float sum = __builtin_bit_cast(float, magnitude) + 0.5f;
    half = __builtin_bit_cast(std::uint32_t, sum) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  to.bits = static_cast<std::uint16_t>(sign | half);
}

template <class T>
FOVEA_INLINE Vec load(const T* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) {
    T x;
    __builtin_memcpy(&x, p + i, sizeof x);
    v[i] = to_f32(x);
  }
  return v;
}
/// Channels 0, 2, .. and 1, 3, .. of 2 * kLanes.
FOVEA_INLINE Vec load_even(const BFloat16* p) {
  Bits bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return reinterpret_cast<Vec>(bits << 16);
}
FOVEA_INLINE Vec load_odd(const BFloat16* p) {
  Bits bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return reinterpret_cast<Vec>(bits & 0xffff0000u);
}
/// In the channels' own order.
FOVEA_INLINE void join_even_odd(Vec* even, Vec* odd) {
  const Vec a = *even, b = *odd;
  *even = Vec{a[0], b[0], a[1], b[1]};
  *odd = Vec{a[2], b[2], a[3], b[3]};
}
/// Pairs (a[i], b[i]) of 2 * kLanes channels: even channels are low.
FOVEA_INLINE void interleave(IntPairs a, IntPairs b, IntPairs* low, IntPairs* high) {
  const Bits row_a = reinterpret_cast<Bits>(a), row_b = reinterpret_cast<Bits>(b);
  *low = reinterpret_cast<IntPairs>(row_b << 16 | (row_a & 0xffffu));
  *high = reinterpret_cast<IntPairs>((row_b & 0xffff0000u) | row_a >> 16);
}
/// Vectors in the order of interleave, in that of the channels.
FOVEA_INLINE void restore_order(Vec* low, Vec* high) { join_even_odd(low, high); }
/// kLanes codes of 4 bits in two's complement, low nibble first.
FOVEA_INLINE Vec unpack_nibbles(const std::uint8_t* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) {
    const int nibble = p[i / 2] >> 4 * (i % 2) & 0xf;
    v[i] = static_cast<float>((nibble ^ 8) - 8);
  }
  return v;
}
template <class T>
FOVEA_INLINE void store(T* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) {
    T x;
    round_to(x, v[i]);
    __builtin_memcpy(p + i, &x, sizeof x);
  }
}

/// kLanes pairs of bf16, the first in the low half.
using Pairs = Bits;

// 8 x 1 or 4 x 2 accumulators.
constexpr int kPairSums = 8;
constexpr int kPairPvRows = 4;
constexpr int kPairPvVectors = 2;

FOVEA_INLINE Pairs load_pairs(const std::uint32_t* p) {
  Pairs v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
FOVEA_INLINE Pairs load_pairs(const BFloat16* p) {
  Pairs v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
FOVEA_INLINE void store_pairs(std::uint32_t* p, Pairs v) { __builtin_memcpy(p, &v, sizeof v); }
FOVEA_INLINE void store(std::int16_t* p, IntPairs v) { __builtin_memcpy(p, &v, sizeof v); }
FOVEA_INLINE Pairs broadcast_pair(std::uint32_t pair) { return Pairs{pair, pair, pair, pair}; }
FOVEA_INLINE Vec first_of(Pairs v) { return reinterpret_cast<Vec>(v << 16); }
FOVEA_INLINE Vec second_of(Pairs v) { return reinterpret_cast<Vec>(v & 0xffff0000u); }
/// sum + a.first * b.first + a.second * b.second
FOVEA_INLINE Vec dot_pairs(Vec sum, Pairs a, Pairs b) {
  return sum + second_of(a) * second_of(b) + first_of(a) * first_of(b);
}
/// The same of int16, exactly.
FOVEA_INLINE IntVec dot_pairs(IntVec sum, Pairs a, Pairs b) {
  return dot_int_pairs(sum, reinterpret_cast<IntPairs>(a), reinterpret_cast<IntPairs>(b));
}
/// Pairs of int16 that bf16 has, as bf16.
FOVEA_INLINE Pairs bf16_of_int16(Pairs v) {
  const Vec first = to_f32(reinterpret_cast<IntVec>(v << 16) >> 16);
  const Vec second = to_f32(reinterpret_cast<IntVec>(v) >> 16);
  return reinterpret_cast<Bits>(first) >> 16 | (reinterpret_cast<Bits>(second) & 0xffff0000u);
}
/// Each half rounded to nearest even.
FOVEA_INLINE Pairs round_to_pairs(Vec first, Vec second) {
  Pairs v;
  for (int i = 0; i < kLanes; ++i) {
    BFloat16 a, b;
    round_to(a, first[i]);
    round_to(b, second[i]);
    v[i] = static_cast<std::uint32_t>(b.bits) << 16 | a.bits;
  }
  return v;
}
/// The same of 2 * kLanes channels of two bytes in memory.
FOVEA_INLINE void interleave(const void* a, const void* b, Pairs* low, Pairs* high) {
  IntPairs row_a, row_b, first, second;
  __builtin_memcpy(&row_a, a, sizeof row_a);
  __builtin_memcpy(&row_b, b, sizeof row_b);
  interleave(row_a, row_b, &first, &second);
  *low = reinterpret_cast<Pairs>(first);
  *high = reinterpret_cast<Pairs>(second);
}
/// The larger exponents, half by half, as any_not_finite wants them.
FOVEA_INLINE Pairs larger_exponents(Pairs exponents, Pairs v) {
  const Pairs low = v & 0x7f80u, high = v & 0x7f800000u;
  const Pairs old_low = exponents & 0x7f80u, old_high = exponents & 0x7f800000u;
  return (low > old_low ? low : old_low) | (high > old_high ? high : old_high);
}
/// Whether a half is infinite or NaN.
FOVEA_INLINE bool any_not_finite(Pairs v) {
  bool any = false;
  for (int i = 0; i < kLanes; ++i) {
    any |= (v[i] & 0x7f80u) == 0x7f80u || (v[i] & 0x7f800000u) == 0x7f800000u;
  }
  return any;
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
