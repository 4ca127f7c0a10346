// Scalar conversions between float32 and the smaller floating-point formats, inline.
//
// Integer arithmetic only: the results depend neither on the rounding mode nor on flush-to-zero
// flags that a caller may have set.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "fovea/dtype.h"

namespace fovea {

/// A sign bit, exponent bits, mantissa bits; subnormals at exponent 0. A code without its sign bit
/// grows with its magnitude.
template <class T>
struct FloatFormat;
template <>
struct FloatFormat<Float16> {
  static constexpr int kExponentBits = 5, kMantissaBits = 10;
  static constexpr bool kHasInfinity = true;
  static constexpr std::uint32_t kMaxFinite = 0x7bff;
};
template <>
struct FloatFormat<BFloat16> {
  static constexpr int kExponentBits = 8, kMantissaBits = 7;
  static constexpr bool kHasInfinity = true;
  static constexpr std::uint32_t kMaxFinite = 0x7f7f;
};
template <>
struct FloatFormat<Float8E5M2> {
  static constexpr int kExponentBits = 5, kMantissaBits = 2;
  static constexpr bool kHasInfinity = true;
  static constexpr std::uint32_t kMaxFinite = 0x7b;
};
template <>
struct FloatFormat<Float8E4M3FN> {
  static constexpr int kExponentBits = 4, kMantissaBits = 3;
  static constexpr bool kHasInfinity = false;
  static constexpr std::uint32_t kMaxFinite = 0x7e;
};
template <>
struct FloatFormat<Float4E2M1> {
  static constexpr int kExponentBits = 2, kMantissaBits = 1;
  static constexpr bool kHasInfinity = false;
  static constexpr std::uint32_t kMaxFinite = 0x7;
};

namespace detail {

// float32: 8 exponent bits of bias 127, 23 mantissa bits.
inline constexpr int kF32MantissaBits = 23;
inline constexpr std::uint32_t kF32SignBit = 0x80000000u;
inline constexpr std::uint32_t kF32Infinity = 0x7f800000u;
inline constexpr std::uint32_t kF32QuietBit = 0x00400000u;
inline constexpr std::uint32_t kF32ImplicitBit = 0x00800000u;

/// value / 2^shift to the nearest integer, ties to even; 1 <= shift <= 31.
constexpr std::uint32_t shift_right_to_even(std::uint32_t value, int shift) {
  const std::uint32_t half_minus_one = (1u << (shift - 1)) - 1;
  return (value + half_minus_one + ((value >> shift) & 1u)) >> shift;
}

template <class T>
constexpr float decode(T x) {
  using Format = FloatFormat<T>;
  constexpr int kTotalBits = 1 + Format::kExponentBits + Format::kMantissaBits;
  constexpr int kShift = kF32MantissaBits - Format::kMantissaBits;
  constexpr int kBias = (1 << (Format::kExponentBits - 1)) - 1;
  constexpr std::uint32_t kSignBit = 1u << (kTotalBits - 1);
  constexpr std::uint32_t kInfinity = Format::kMaxFinite + 1;  // Of formats that have one.

  const std::uint32_t code = x.bits;
  const std::uint32_t sign = (code & kSignBit) << (32 - kTotalBits);
  const std::uint32_t magnitude = code & (kSignBit - 1);
  if constexpr (kBias == 127) {
    return std::bit_cast<float>(sign | magnitude << kShift);
  } else {
    std::uint32_t bits = (magnitude << kShift) + ((127u - kBias) << kF32MantissaBits);
    if (magnitude < (1u << Format::kMantissaBits)) {
      // Subnormal: an integer times the smallest step, exact in float32.
      constexpr float kStep =
          std::bit_cast<float>((127u + 1 - kBias - Format::kMantissaBits) << kF32MantissaBits);
      bits = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * kStep);
    }
    if (Format::kHasInfinity && magnitude >= kInfinity) {
      bits = kF32Infinity | magnitude << kShift;
    }
    if (std::is_same_v<T, Float8E4M3FN> && magnitude > Format::kMaxFinite) {
      bits = kF32Infinity | kF32QuietBit;
    }
    return std::bit_cast<float>(sign | bits);
  }
}

template <class T>
constexpr T encode(float x, bool saturate) {
  using Format = FloatFormat<T>;
  using Bits = decltype(T::bits);
  constexpr int kTotalBits = 1 + Format::kExponentBits + Format::kMantissaBits;
  constexpr int kShift = kF32MantissaBits - Format::kMantissaBits;
  constexpr int kBias = (1 << (Format::kExponentBits - 1)) - 1;

  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits & kF32SignBit) >> (32 - kTotalBits);
  const std::uint32_t magnitude = bits & ~kF32SignBit;
  if (magnitude > kF32Infinity) {
    if constexpr (std::is_same_v<T, Float4E2M1>) return T{Format::kMaxFinite};
    // As processors do: the payload's upper bits stay, the NaN becomes quiet.
    const std::uint32_t nan =
        Format::kHasInfinity ? (magnitude | kF32QuietBit) >> kShift & ((1u << (kTotalBits - 1)) - 1)
                             : Format::kMaxFinite + 1;
    return T{static_cast<Bits>(sign | nan)};
  }

  const int biased = static_cast<int>(magnitude >> kF32MantissaBits);
  const std::uint32_t mantissa = magnitude & (kF32ImplicitBit - 1);
  const std::uint32_t significand = biased == 0 ? mantissa : mantissa | kF32ImplicitBit;
  const int exponent = (biased == 0 ? 1 : biased) - 127 + kBias;  // In the small format.
  std::uint32_t rounded = 0;
  if (exponent >= 1) {
    // The implicit bit raises exponent - 1 to exponent; a carry out of the mantissa does the same.
    const std::uint32_t value = ((static_cast<std::uint32_t>(exponent) - 1) << kF32MantissaBits);
    rounded = shift_right_to_even(value + significand, kShift);
  } else if (kShift + 1 - exponent <= kF32MantissaBits + 1) {
    rounded = shift_right_to_even(significand, kShift + 1 - exponent);
  }
  if (rounded > Format::kMaxFinite) {
    rounded = Format::kHasInfinity && !saturate ? Format::kMaxFinite + 1 : Format::kMaxFinite;
  }
  return T{static_cast<Bits>(sign | rounded)};
}

}  // namespace detail

/// to_float, inline.
constexpr float widen(float x) { return x; }
template <class T>
constexpr float widen(T x) {
  return detail::decode(x);
}
template <>
constexpr float widen(Float8E8M0 x) {
  if (x.bits == 0xff) return std::bit_cast<float>(detail::kF32Infinity | detail::kF32QuietBit);
  // 2^-127 is subnormal in float32.
  if (x.bits == 0) return std::bit_cast<float>(detail::kF32ImplicitBit >> 1);
  return std::bit_cast<float>(std::uint32_t{x.bits} << detail::kF32MantissaBits);
}

/// from_float and from_float_saturated, inline.
template <class T>
constexpr T narrow(float x) {
  return detail::encode<T>(x, false);
}
template <class T>
constexpr T narrow_saturated(float x) {
  return detail::encode<T>(x, true);
}
template <>
constexpr float narrow<float>(float x) {
  return x;
}
template <>
constexpr Float8E8M0 narrow<Float8E8M0>(float x) {
  using namespace detail;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & ~kF32SignBit) > kF32Infinity) return {0xff};
  if ((bits & kF32SignBit) != 0) return {0};
  // Below 2^-126 float32 is subnormal: 1.5 * 2^-127 lies between codes 0 and 1, the tie goes to 0.
  if (bits < kF32ImplicitBit) return {std::uint8_t{bits > 0x00600000u}};
  const std::uint32_t code = shift_right_to_even(bits, kF32MantissaBits);
  return {static_cast<std::uint8_t>(code > 0xfe ? 0xfe : code)};
}
template <>
constexpr Float8E8M0 narrow_saturated<Float8E8M0>(float x) {
  return narrow<Float8E8M0>(x);
}

}  // namespace fovea
