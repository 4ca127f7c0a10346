// Primitives of AVX-512 F, BW, DQ and VL: sixteen lanes, thirty-two registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "fovea/dtype.h"

#define FOVEA_INLINE inline __attribute__((always_inline))

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

using Vec = __m512;
using Mask = __mmask16;

constexpr int kLanes = 16;
// 12 x 2 accumulators and two vectors of Q; K is broadcast by the FMA itself.
constexpr int kQkTokens = 12;
constexpr int kQkVectors = 2;
// 8 x 3 accumulators and three vectors of V.
constexpr int kPvRows = 8;
constexpr int kPvVectors = 3;
// 4 x 4, 2 x 8 or 1 x 16 accumulators, four vectors of Q and one of K.
constexpr int kDotSums = 16;

FOVEA_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
FOVEA_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
FOVEA_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
FOVEA_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
FOVEA_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
FOVEA_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
FOVEA_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
/// a * b + c, fused.
FOVEA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
FOVEA_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
FOVEA_INLINE Vec select(Mask mask, Vec a, Vec b) { return _mm512_mask_blend_ps(mask, b, a); }
/// b where either is NaN.
FOVEA_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
/// To nearest even.
FOVEA_INLINE Vec round(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/// x * 2^n for integral n in [-126, 127], x and the result normal. NaN when x is.
FOVEA_INLINE Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
FOVEA_INLINE float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }

/// Integers, and pairs of int16, the first in the low half.
typedef std::int32_t IntVec __attribute__((vector_size(64)));
typedef std::int16_t IntPairs __attribute__((vector_size(64)));
FOVEA_INLINE IntVec broadcast_int(std::int32_t x) { return (IntVec)_mm512_set1_epi32(x); }
FOVEA_INLINE IntVec add(IntVec a, IntVec b) { return a + b; }
FOVEA_INLINE Vec to_f32(IntVec v) { return _mm512_cvtepi32_ps((__m512i)v); }
/// kWords int32 or pairs of int16, again and again.
template <int kWords>
FOVEA_INLINE IntPairs repeat_words(const void* p) {
  if constexpr (kWords == 16) return (IntPairs)_mm512_loadu_si512(p);
  if constexpr (kWords == 8) {
    return (IntPairs)_mm512_broadcast_i64x4(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  if constexpr (kWords == 4) {
    return (IntPairs)_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  if constexpr (kWords == 2) {
    return (IntPairs)_mm512_broadcastq_epi64(_mm_loadu_si64(p));
  }
  return (IntPairs)_mm512_broadcastd_epi32(_mm_loadu_si32(p));
}
FOVEA_INLINE IntPairs load_int_pairs(const std::int8_t* p) {
  return (IntPairs)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
/// sum + a.first * b.first + a.second * b.second
FOVEA_INLINE IntVec dot_int_pairs(IntVec sum, IntPairs a, IntPairs b) {
#ifdef __AVX512VNNI__
  return (IntVec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  return sum + (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}
/// Pairs (a[i], b[i]) of 2 * kLanes channels: within 128 bits, so that channels 0-3, 8-11, 16-19
/// and 24-27 are low.
FOVEA_INLINE void interleave(IntPairs a, IntPairs b, IntPairs* low, IntPairs* high) {
  *low = (IntPairs)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  *high = (IntPairs)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}
/// Vectors in the order of interleave, in that of the channels.
FOVEA_INLINE void restore_order(Vec* low, Vec* high) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const Vec a = *low;
  *low = _mm512_permutex2var_ps(a, first, *high);
  *high = _mm512_permutex2var_ps(a, second, *high);
}

/// Lane i: the sum of the lanes of v[i], in one order for all.
FOVEA_INLINE Vec sums_of_lanes(const Vec (&v)[kLanes]) {
  Vec quarters[4];  // [128 bits] sums of four vectors
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec *a = v + 4 * i, *b = a + 1, *c = a + 2, *d = a + 3;
    const Vec ab = add(_mm512_unpacklo_ps(*a, *b), _mm512_unpackhi_ps(*a, *b));
    const Vec cd = add(_mm512_unpacklo_ps(*c, *d), _mm512_unpackhi_ps(*c, *d));
    quarters[i] = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
  const auto fold = [](Vec a, Vec b) __attribute__((always_inline)) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return fold(fold(quarters[0], quarters[1]), fold(quarters[2], quarters[3]));
}
FOVEA_INLINE Vec load(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FOVEA_INLINE Vec load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
/// Channels 0, 2, .. and 1, 3, .. of 2 * kLanes.
FOVEA_INLINE Vec load_even(const BFloat16* p) {
  return (Vec)_mm512_slli_epi32(_mm512_loadu_si512(p), 16);
}
FOVEA_INLINE Vec load_odd(const BFloat16* p) {
  return (Vec)_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-0x10000));
}
/// In the channels' own order.
FOVEA_INLINE void join_even_odd(Vec* even, Vec* odd) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const Vec first = *even;
  *even = _mm512_permutex2var_ps(first, low, *odd);
  *odd = _mm512_permutex2var_ps(first, high, *odd);
}
FOVEA_INLINE Vec load(const std::int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
/// The upper byte of an f16.
FOVEA_INLINE Vec load(const Float8E5M2* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
}
/// As f16 bits with the same exponent field: 2^-8 of the value, since the biases differ by 8.
FOVEA_INLINE Vec load(const Float8E4M3FN* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i codes = _mm256_cvtepu8_epi16(bytes);
  const __m256i magnitude = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x7f)), 7);
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)), 8);
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f << 7));
  const __m256i nan = _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, magnitude), nan);
  return mul(_mm512_cvtph_ps(half), broadcast(256.f));
}
/// kLanes codes of 4 bits in two's complement, low nibble first.
FOVEA_INLINE Vec unpack_nibbles(const std::uint8_t* p) {
  std::int32_t packed[2];
  __builtin_memcpy(packed, p, sizeof packed);
  const __m512i both =
      _mm512_inserti64x4(_mm512_set1_epi32(packed[0]), _mm256_set1_epi32(packed[1]), 1);
  const __m512i shifts =
      _mm512_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sllv_epi32(both, shifts), 28));
}

FOVEA_INLINE void store(Float16* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FOVEA_INLINE void store(BFloat16* p, Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet_nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const Mask is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i high = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet_nan), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
