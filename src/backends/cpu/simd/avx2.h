// Primitives of AVX2 with FMA and F16C: eight lanes, sixteen registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "fovea/dtype.h"

#define FOVEA_INLINE inline __attribute__((always_inline))

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

using Vec = __m256;
using Mask = __m256;

constexpr int kLanes = 8;
// 6 x 2 accumulators, two vectors of Q and one broadcast of K: 15 of 16 registers. Two FMAs of
// latency 5 per cycle need ten independent ones.
constexpr int kQkTokens = 6;
constexpr int kQkVectors = 2;
// 4 x 3 accumulators, three vectors of V and one broadcast of P: all 16.
constexpr int kPvRows = 4;
constexpr int kPvVectors = 3;
// 4 x 2, 2 x 4 or 1 x 8 accumulators, four vectors of Q and one of K.
constexpr int kDotSums = 8;

FOVEA_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
FOVEA_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
FOVEA_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
FOVEA_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
FOVEA_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
FOVEA_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
FOVEA_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
/// a * b + c, fused.
FOVEA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
FOVEA_INLINE Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
FOVEA_INLINE Vec select(Mask mask, Vec a, Vec b) { return _mm256_blendv_ps(b, a, mask); }
/// b where either is NaN.
FOVEA_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
/// To nearest even.
FOVEA_INLINE Vec round(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/// x * 2^n for integral n in [-126, 127], x and the result normal. NaN when x is.
FOVEA_INLINE Vec scale_by_power(Vec x, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
}
FOVEA_INLINE float reduce_add(Vec v) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/// Integers, and pairs of int16, the first in the low half.
typedef std::int32_t IntVec __attribute__((vector_size(32)));
typedef std::int16_t IntPairs __attribute__((vector_size(32)));
FOVEA_INLINE IntVec broadcast_int(std::int32_t x) { return (IntVec)_mm256_set1_epi32(x); }
FOVEA_INLINE IntVec add(IntVec a, IntVec b) { return a + b; }
FOVEA_INLINE Vec to_f32(IntVec v) { return _mm256_cvtepi32_ps((__m256i)v); }
/// kWords int32 or pairs of int16, again and again.
template <int kWords>
FOVEA_INLINE IntPairs repeat_words(const void* p) {
  if constexpr (kWords == 8) return (IntPairs)_mm256_loadu_si256(static_cast<const __m256i*>(p));
  if constexpr (kWords == 4) {
    return (IntPairs)_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  if constexpr (kWords == 2) return (IntPairs)_mm256_broadcastq_epi64(_mm_loadu_si64(p));
  return (IntPairs)_mm256_broadcastd_epi32(_mm_loadu_si32(p));
}
FOVEA_INLINE IntPairs load_int_pairs(const std::int8_t* p) {
  return (IntPairs)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
/// Pairs (a[i], b[i]) of 2 * kLanes channels: within 128 bits, so that channels 0-3 and 8-11 are
/// low.
FOVEA_INLINE void interleave(IntPairs a, IntPairs b, IntPairs* low, IntPairs* high) {
  *low = (IntPairs)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
  *high = (IntPairs)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
}
/// Vectors in the order of interleave, in that of the channels.
FOVEA_INLINE void restore_order(Vec* low, Vec* high) {
  const Vec a = *low;
  *low = _mm256_permute2f128_ps(a, *high, 0x20);
  *high = _mm256_permute2f128_ps(a, *high, 0x31);
}
/// sum + a.first * b.first + a.second * b.second
FOVEA_INLINE IntVec dot_int_pairs(IntVec sum, IntPairs a, IntPairs b) {
  return sum + (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

/// Lane i: the sum of the lanes of v[i], in one order for all.
FOVEA_INLINE Vec sums_of_lanes(const Vec (&v)[kLanes]) {
  Vec halves[2];  // [128 bits] sums of four vectors
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    // As horizontal adds, which AMD's processors take twice as long for.
    const Vec *a = v + 4 * i, *b = a + 1, *c = a + 2, *d = a + 3;
    const Vec ab = add(_mm256_unpacklo_ps(*a, *b), _mm256_unpackhi_ps(*a, *b));
    const Vec cd = add(_mm256_unpacklo_ps(*c, *d), _mm256_unpackhi_ps(*c, *d));
    halves[i] = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  }
  return add(_mm256_permute2f128_ps(halves[0], halves[1], 0x20),
             _mm256_permute2f128_ps(halves[0], halves[1], 0x31));
}
FOVEA_INLINE Vec load(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FOVEA_INLINE Vec load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
/// Channels 0, 2, .. and 1, 3, .. of 2 * kLanes.
FOVEA_INLINE Vec load_even(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
FOVEA_INLINE Vec load_odd(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-0x10000)));
}
/// In the channels' own order.
FOVEA_INLINE void join_even_odd(Vec* even, Vec* odd) {
  const Vec low = _mm256_unpacklo_ps(*even, *odd), high = _mm256_unpackhi_ps(*even, *odd);
  *even = _mm256_permute2f128_ps(low, high, 0x20);
  *odd = _mm256_permute2f128_ps(low, high, 0x31);
}
FOVEA_INLINE Vec load(const std::int8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
/// The upper byte of an f16.
FOVEA_INLINE Vec load(const Float8E5M2* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8));
}
/// As f16 bits with the same exponent field: 2^-8 of the value, since the biases differ by 8.
FOVEA_INLINE Vec load(const Float8E4M3FN* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i codes = _mm_cvtepu8_epi16(bytes);
  const __m128i magnitude = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(0x7f)), 7);
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(0x80)), 8);
  const __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f << 7));
  const __m128i nan = _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00));
  const __m128i half = _mm_or_si128(_mm_or_si128(sign, magnitude), nan);
  return mul(_mm256_cvtph_ps(half), broadcast(256.f));
}
/// kLanes codes of 4 bits in two's complement, low nibble first.
FOVEA_INLINE Vec unpack_nibbles(const std::uint8_t* p) {
  std::int32_t packed;
  __builtin_memcpy(&packed, p, sizeof packed);
  const __m256i shifts = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
  const __m256i top = _mm256_sllv_epi32(_mm256_set1_epi32(packed), shifts);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(top, 28));
}

FOVEA_INLINE void store(Float16* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FOVEA_INLINE void store(BFloat16* p, Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet_nan, is_nan), 16);
  // Packing works within 128-bit halves; 0b1000 brings the two wanted quarters together.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
