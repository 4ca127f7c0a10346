// Primitives of AArch64's Advanced SIMD: four lanes, thirty-two registers.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "fovea/dtype.h"

#define FOVEA_INLINE inline __attribute__((always_inline))

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

using Vec = float32x4_t;
using Mask = uint32x4_t;

constexpr int kLanes = 4;
// 6 x 4 accumulators, four vectors of Q and one broadcast of K: 29 of 32 registers. Four FMAs of
// latency 4 per cycle need sixteen independent ones.
constexpr int kQkTokens = 6;
constexpr int kQkVectors = 4;
// 4 x 4 accumulators, four vectors of V and one broadcast of P.
constexpr int kPvRows = 4;
constexpr int kPvVectors = 4;
// 2 x 4 or 1 x 8 accumulators, two vectors of Q and one of K.
constexpr int kDotSums = 8;

FOVEA_INLINE Vec load(const float* p) { return vld1q_f32(p); }
FOVEA_INLINE void store(float* p, Vec v) { vst1q_f32(p, v); }
FOVEA_INLINE Vec broadcast(float x) { return vdupq_n_f32(x); }
FOVEA_INLINE Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
FOVEA_INLINE Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
FOVEA_INLINE Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
FOVEA_INLINE Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
/// a * b + c, fused.
FOVEA_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
FOVEA_INLINE Mask less(Vec a, Vec b) { return vcltq_f32(a, b); }
FOVEA_INLINE Vec select(Mask mask, Vec a, Vec b) { return vbslq_f32(mask, a, b); }
/// b where either is NaN, unlike vmaxq_f32.
FOVEA_INLINE Vec max(Vec a, Vec b) { return select(less(b, a), a, b); }
/// To nearest even.
FOVEA_INLINE Vec round(Vec x) { return vrndnq_f32(x); }
/// x * 2^n for integral n in [-126, 127], x and the result normal. NaN when x is.
FOVEA_INLINE Vec scale_by_power(Vec x, Vec n) {
  const int32x4_t exponent = vshlq_n_s32(vcvtnq_s32_f32(n), 23);
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), exponent));
}
FOVEA_INLINE float reduce_add(Vec v) { return vaddvq_f32(v); }

/// Integers, and pairs of int16, the first in the low half.
using IntVec = int32x4_t;
using IntPairs = int16x8_t;
FOVEA_INLINE IntVec broadcast_int(std::int32_t x) { return vdupq_n_s32(x); }
FOVEA_INLINE Vec to_f32(IntVec v) { return vcvtq_f32_s32(v); }
FOVEA_INLINE IntVec add(IntVec a, IntVec b) { return vaddq_s32(a, b); }
/// kWords int32 or pairs of int16, again and again.
template <int kWords>
FOVEA_INLINE IntPairs repeat_words(const void* p) {
  std::int32_t words[kLanes];
  for (int i = 0; i < kLanes; i += kWords) __builtin_memcpy(words + i, p, kWords * sizeof words[0]);
  return vreinterpretq_s16_s32(vld1q_s32(words));
}
FOVEA_INLINE IntPairs load_int_pairs(const std::int8_t* p) { return vmovl_s8(vld1_s8(p)); }
/// Pairs (a[i], b[i]) of 2 * kLanes channels.
FOVEA_INLINE void interleave(IntPairs a, IntPairs b, IntPairs* low, IntPairs* high) {
  *low = vzip1q_s16(a, b);
  *high = vzip2q_s16(a, b);
}
/// Vectors in the order of interleave, in that of the channels: they are.
FOVEA_INLINE void restore_order(Vec*, Vec*) {}
/// sum + a.first * b.first + a.second * b.second
FOVEA_INLINE IntVec dot_int_pairs(IntVec sum, IntPairs a, IntPairs b) {
  const IntVec low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
  return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(a, b)));
}

/// Lane i: the sum of the lanes of v[i], in one order for all.
FOVEA_INLINE Vec sums_of_lanes(const Vec (&v)[kLanes]) {
  return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
}
/// Four elements of two bytes, four of one.
FOVEA_INLINE uint16x4_t load_halves(const void* p) {
  uint16x4_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return bits;
}
FOVEA_INLINE uint8x8_t load_bytes(const void* p) {
  std::uint32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return vreinterpret_u8_u32(vdup_n_u32(bytes));
}
FOVEA_INLINE Vec from_f16(uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }

FOVEA_INLINE Vec load(const Float16* p) { return from_f16(load_halves(p)); }
FOVEA_INLINE Vec load(const BFloat16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(load_halves(p), 16));
}
/// Channels 0, 2, .. and 1, 3, .. of 2 * kLanes.
FOVEA_INLINE Vec load_even(const BFloat16* p) {
  uint32x4_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
}
FOVEA_INLINE Vec load_odd(const BFloat16* p) {
  uint32x4_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)));
}
/// In the channels' own order.
FOVEA_INLINE void join_even_odd(Vec* even, Vec* odd) {
  const Vec first = *even;
  *even = vzip1q_f32(first, *odd);
  *odd = vzip2q_f32(first, *odd);
}
FOVEA_INLINE Vec load(const std::int8_t* p) {
  const int16x8_t halves = vmovl_s8(vreinterpret_s8_u8(load_bytes(p)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves)));
}
/// The upper byte of an f16.
FOVEA_INLINE Vec load(const Float8E5M2* p) {
  return from_f16(vget_low_u16(vshll_n_u8(load_bytes(p), 8)));
}
/// As f16 bits with the same exponent field: 2^-8 of the value, since the biases differ by 8.
FOVEA_INLINE Vec load(const Float8E4M3FN* p) {
  const uint16x4_t codes = vget_low_u16(vmovl_u8(load_bytes(p)));
  const uint16x4_t magnitude = vshl_n_u16(vand_u16(codes, vdup_n_u16(0x7f)), 7);
  const uint16x4_t sign = vshl_n_u16(vand_u16(codes, vdup_n_u16(0x80)), 8);
  const uint16x4_t is_nan = vceq_u16(magnitude, vdup_n_u16(0x7f << 7));
  const uint16x4_t nan = vand_u16(is_nan, vdup_n_u16(0x7e00));
  return mul(from_f16(vorr_u16(vorr_u16(sign, magnitude), nan)), broadcast(256.f));
}
/// kLanes codes of 4 bits in two's complement, low nibble first.
FOVEA_INLINE Vec unpack_nibbles(const std::uint8_t* p) {
  const int32x4_t shifts = {28, 24, 20, 16};
  const uint32x4_t packed = vdupq_n_u32(static_cast<std::uint32_t>(p[0] | p[1] << 8));
  return vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_u32(vshlq_u32(packed, shifts)), 28));
}

FOVEA_INLINE void store(Float16* p, Vec v) {
  const uint16x4_t bits = vreinterpret_u16_f16(vcvt_f16_f32(v));
  __builtin_memcpy(static_cast<void*>(p), &bits, sizeof bits);
}
FOVEA_INLINE void store(BFloat16* p, Vec v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet_nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
  const uint16x4_t high = vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet_nan), 16);
  __builtin_memcpy(static_cast<void*>(p), &high, sizeof high);
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
