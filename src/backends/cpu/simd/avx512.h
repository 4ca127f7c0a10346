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
/// Sums of the lanes of each to out[0 .. 3].
FOVEA_INLINE void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const auto fold = [](Vec v) __attribute__((always_inline)) {
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  };
  const __m256 ab = _mm256_hadd_ps(fold(a), fold(b));
  const __m256 halves = _mm256_hadd_ps(ab, _mm256_hadd_ps(fold(c), fold(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

FOVEA_INLINE Vec load(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FOVEA_INLINE Vec load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
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
