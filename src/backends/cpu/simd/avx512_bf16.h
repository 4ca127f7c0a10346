// Primitives of AVX-512 BF16 beside those of AVX-512: products of pairs.
#pragma once

#include "backends/cpu/simd/avx512.h"

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// kLanes pairs of bf16, the first in the low half.
using Pairs = __m512i;

// 16 x 1 or 8 x 2 accumulators: two products of latency 6 per cycle need twelve independent ones,
// and 16 tokens divide the usual blocks.
constexpr int kPairSums = 16;
// 8 x 3 accumulators, three vectors of V and a broadcast of P.
constexpr int kPairPvRows = 8;
constexpr int kPairPvVectors = 3;

FOVEA_INLINE Pairs load_pairs(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
FOVEA_INLINE Pairs load_pairs(const BFloat16* p) { return _mm512_loadu_si512(p); }
FOVEA_INLINE void store_pairs(std::uint32_t* p, Pairs v) { _mm512_storeu_si512(p, v); }
FOVEA_INLINE void store(std::int16_t* p, IntPairs v) { _mm512_storeu_si512(p, (__m512i)v); }
FOVEA_INLINE Pairs broadcast_pair(std::uint32_t pair) {
  return _mm512_set1_epi32(static_cast<int>(pair));
}
/// sum + a.first * b.first + a.second * b.second; subnormal operands and results count as zero.
FOVEA_INLINE Vec dot_pairs(Vec sum, Pairs a, Pairs b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
/// The same of int16, exactly.
FOVEA_INLINE IntVec dot_pairs(IntVec sum, Pairs a, Pairs b) {
  return dot_int_pairs(sum, (IntPairs)a, (IntPairs)b);
}
/// sum + a[0] * b[0] + ... + a[3] * b[3] in each lane, of unsigned bytes a and signed ones b,
/// modulo 2^32.
FOVEA_INLINE IntVec dot_bytes(IntVec sum, IntVec a, IntVec b) {
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
/// Pairs of int16 that bf16 has, as bf16.
FOVEA_INLINE Pairs bf16_of_int16(Pairs v) {
  const __m512 first = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 16), 16));
  const __m512 second = _mm512_cvtepi32_ps(_mm512_srai_epi32(v, 16));
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(first), 16),
                                 _mm512_castps_si512(second));
}
/// Each half rounded to nearest even.
FOVEA_INLINE Pairs round_to_pairs(Vec first, Vec second) {
  const auto low = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(first));
  const auto high = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(second));
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), upper);
}
/// The same of 2 * kLanes channels of two bytes in memory.
FOVEA_INLINE void interleave(const void* a, const void* b, Pairs* low, Pairs* high) {
  IntPairs first, second;
  interleave((IntPairs)_mm512_loadu_si512(a), (IntPairs)_mm512_loadu_si512(b), &first, &second);
  *low = (Pairs)first;
  *high = (Pairs)second;
}
/// The larger exponents, half by half, as any_not_finite wants them.
FOVEA_INLINE Pairs larger_exponents(Pairs exponents, Pairs v) {
  return _mm512_max_epu16(exponents, _mm512_and_si512(v, _mm512_set1_epi16(0x7f80)));
}
/// Whether a half is infinite or NaN.
FOVEA_INLINE bool any_not_finite(Pairs exponents) {
  return _mm512_cmpeq_epi16_mask(exponents, _mm512_set1_epi16(0x7f80)) != 0;
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
