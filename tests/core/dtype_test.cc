// Scalar conversions against the formats' definitions: values are built with ldexp, and the nearest
// one is searched for, so nothing of the implementation's bit arithmetic is repeated.
#include "fovea/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/float_bits.h"
#include "fovea/error.h"
#include "support/poison.h"

namespace fovea {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class T>
struct Spec;
template <>
struct Spec<Float16> {
  static constexpr int kBits = 16, kMantissa = 10, kBias = 15;
  static constexpr bool kIeee = true;
};
template <>
struct Spec<BFloat16> {
  static constexpr int kBits = 16, kMantissa = 7, kBias = 127;
  static constexpr bool kIeee = true;
};
template <>
struct Spec<Float8E4M3FN> {
  static constexpr int kBits = 8, kMantissa = 3, kBias = 7;
  static constexpr bool kIeee = false;
};
template <>
struct Spec<Float8E5M2> {
  static constexpr int kBits = 8, kMantissa = 2, kBias = 15;
  static constexpr bool kIeee = true;
};
template <>
struct Spec<Float4E2M1> {
  static constexpr int kBits = 4, kMantissa = 1, kBias = 1;
  static constexpr bool kIeee = false;
};

template <class T>
constexpr bool kHasNaN = !std::is_same_v<T, Float4E2M1>;

/// The value of a code, from the format's definition.
template <class T>
double value_of(unsigned code) {
  using S = Spec<T>;
  const unsigned exponent_codes = 1u << (S::kBits - 1 - S::kMantissa);
  const unsigned mantissa = code % (1u << S::kMantissa);
  const unsigned exponent = code / (1u << S::kMantissa) % exponent_codes;
  const double sign = code >= (1u << (S::kBits - 1)) ? -1 : 1;
  if (S::kIeee && exponent == exponent_codes - 1) return mantissa == 0 ? sign * kInf : kNaN;
  if (std::is_same_v<T, Float8E4M3FN> && code % 128 == 127) return kNaN;
  const double fraction = std::ldexp(mantissa, -S::kMantissa);
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - S::kBias);
  return sign * std::ldexp(1 + fraction, static_cast<int>(exponent) - S::kBias);
}

template <class T>
T from_code(unsigned code) {
  T x;
  x.bits = static_cast<decltype(x.bits)>(code);
  return x;
}

/// The codes of all finite non-negative values, in ascending order of value: code 0 and up.
template <class T>
std::vector<double> ladder() {
  std::vector<double> values;
  for (unsigned code = 0; code < (1u << (Spec<T>::kBits - 1)); ++code) {
    const double value = value_of<T>(code);
    if (!std::isfinite(value)) break;
    values.push_back(value);
  }
  return values;
}

template <class T>
class FloatFormatTest : public ::testing::Test {};
using Formats = ::testing::Types<Float16, BFloat16, Float8E4M3FN, Float8E5M2, Float4E2M1>;
TYPED_TEST_SUITE(FloatFormatTest, Formats);

TYPED_TEST(FloatFormatTest, EveryCodeHasTheValueOfTheDefinition) {
  for (unsigned code = 0; code < (1u << Spec<TypeParam>::kBits); ++code) {
    const double expected = value_of<TypeParam>(code);
    const float got = to_float(from_code<TypeParam>(code));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << "code " << code;
    } else {
      ASSERT_EQ(static_cast<double>(got), expected) << "code " << code;
      ASSERT_EQ(std::signbit(got), std::signbit(expected)) << "code " << code;
    }
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got),
              std::bit_cast<std::uint32_t>(widen(from_code<TypeParam>(code))));
  }
}

TYPED_TEST(FloatFormatTest, EveryCodeSurvivesTheRoundTrip) {
  for (unsigned code = 0; code < (1u << Spec<TypeParam>::kBits); ++code) {
    const float value = to_float(from_code<TypeParam>(code));
    const unsigned back = from_float<TypeParam>(value).bits;
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(value_of<TypeParam>(back))) << "code " << code << " -> " << back;
      ASSERT_EQ(back >> (Spec<TypeParam>::kBits - 1), code >> (Spec<TypeParam>::kBits - 1));
    } else {
      ASSERT_EQ(back, code);
    }
  }
}

/// Between each two adjacent values: just below, at, and just above their midpoint.
TYPED_TEST(FloatFormatTest, RoundsToNearestWithTiesToEvenAtEveryMidpoint) {
  const std::vector<double> values = ladder<TypeParam>();
  const unsigned sign = 1u << (Spec<TypeParam>::kBits - 1);
  for (unsigned code = 0; code + 1 < values.size(); ++code) {
    const double exact = (values[code] + values[code + 1]) / 2;
    const float middle = static_cast<float>(exact);
    ASSERT_EQ(static_cast<double>(middle), exact) << "a midpoint must be a float32";
    const unsigned even = code % 2 == 0 ? code : code + 1;
    ASSERT_EQ(from_float<TypeParam>(middle).bits, even) << "midpoint " << middle;
    ASSERT_EQ(from_float<TypeParam>(-middle).bits, even | sign);
    const float below = std::nextafter(middle, 0.f);
    const float above = std::nextafter(middle, kInf);
    ASSERT_EQ(from_float<TypeParam>(below).bits, code) << "below the midpoint " << middle;
    ASSERT_EQ(from_float<TypeParam>(above).bits, code + 1) << "above the midpoint " << middle;
    ASSERT_EQ(from_float<TypeParam>(-below).bits, code | sign);
    ASSERT_EQ(from_float<TypeParam>(-above).bits, (code + 1) | sign);
    ASSERT_EQ(from_float_saturated<TypeParam>(middle).bits, even);
    // One step off the values themselves.
    ASSERT_EQ(from_float<TypeParam>(std::nextafter(static_cast<float>(values[code]), kInf)).bits,
              code);
    ASSERT_EQ(from_float<TypeParam>(std::nextafter(static_cast<float>(values[code + 1]), 0.f)).bits,
              code + 1);
  }
}

TYPED_TEST(FloatFormatTest, RandomFloatsGoToTheNearestValue) {
  const std::vector<double> values = ladder<TypeParam>();
  for (std::uint64_t i = 0; i < 50000; ++i) {
    const auto bits = static_cast<std::uint32_t>(test::random_bits(1, i));
    const float x = std::bit_cast<float>(bits);
    if (!std::isfinite(x) || std::abs(static_cast<double>(x)) > values.back()) continue;
    const double got = value_of<TypeParam>(from_float<TypeParam>(x).bits);
    const double magnitude = std::abs(static_cast<double>(x));
    const auto upper = std::lower_bound(values.begin(), values.end(), magnitude);
    double best = *upper - magnitude;
    if (upper != values.begin()) best = std::min(best, magnitude - *(upper - 1));
    ASSERT_EQ(std::abs(std::abs(got) - magnitude), best) << x;
    ASSERT_EQ(std::signbit(got), std::signbit(x)) << x;
  }
}

TYPED_TEST(FloatFormatTest, OverflowAndInfinitiesFollowTheFormat) {
  using S = Spec<TypeParam>;
  const std::vector<double> values = ladder<TypeParam>();
  const auto largest = static_cast<unsigned>(values.size() - 1);
  const unsigned overflow = S::kIeee ? largest + 1 : largest;
  const unsigned sign = 1u << (S::kBits - 1);
  const double step = values[largest] - values[largest - 1];
  // Where the next value would stand if the exponent went on.
  const float edge = static_cast<float>(values[largest] + step / 2);
  // An IEEE format's largest code is odd, so the tie goes up, to infinity.
  EXPECT_EQ(from_float<TypeParam>(std::nextafter(edge, 0.f)).bits, largest);
  for (const float x : {edge, std::numeric_limits<float>::max(), kInf}) {
    EXPECT_EQ(from_float<TypeParam>(x).bits, overflow) << x;
    EXPECT_EQ(from_float<TypeParam>(-x).bits, overflow | sign) << x;
    EXPECT_EQ(from_float_saturated<TypeParam>(x).bits, largest) << x;
    EXPECT_EQ(from_float_saturated<TypeParam>(-x).bits, largest | sign) << x;
  }
}

TYPED_TEST(FloatFormatTest, UnderflowKeepsTheSignOfZero) {
  const float smallest = static_cast<float>(value_of<TypeParam>(1));
  const unsigned sign = 1u << (Spec<TypeParam>::kBits - 1);
  for (const float x : {0.f, smallest / 4, std::numeric_limits<float>::denorm_min()}) {
    EXPECT_EQ(from_float<TypeParam>(x).bits, 0u) << x;
    EXPECT_EQ(from_float<TypeParam>(-x).bits, sign) << x;
  }
}

TYPED_TEST(FloatFormatTest, EveryNaNStaysNaNWhereTheFormatHasOne) {
  const std::uint32_t patterns[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u,
                                    0x7fffffffu, 0xffffffffu, 0x7fa00000u, 0x7f802000u};
  for (const std::uint32_t pattern : patterns) {
    const float nan = std::bit_cast<float>(pattern);
    const unsigned code = from_float<TypeParam>(nan).bits;
    const unsigned saturated = from_float_saturated<TypeParam>(nan).bits;
    if constexpr (kHasNaN<TypeParam>) {
      EXPECT_TRUE(std::isnan(value_of<TypeParam>(code))) << std::hex << pattern;
      EXPECT_EQ(code >> (Spec<TypeParam>::kBits - 1), pattern >> 31) << std::hex << pattern;
      EXPECT_EQ(saturated, code);
    } else {
      EXPECT_EQ(to_float(from_code<TypeParam>(code)), 6.f) << std::hex << pattern;
    }
  }
}

// B129
TEST(Float8E4M3FNTest, SaturatesInsteadOfOverflowing) {
  const float inputs[] = {448, 464, 465, 1000, -1000, kInf, -kInf};
  const float expected[] = {448, 448, 448, 448, -448, 448, -448};
  for (std::size_t i = 0; i < std::size(inputs); ++i) {
    EXPECT_EQ(to_float(from_float<Float8E4M3FN>(inputs[i])), expected[i]) << inputs[i];
  }
  EXPECT_TRUE(std::isnan(to_float(from_float<Float8E4M3FN>(kNaN))));
}

TEST(Float8E8M0Test, EveryCodeIsAPowerOfTwoAndSurvives) {
  for (unsigned code = 0; code < 255; ++code) {
    const float value = to_float(Float8E8M0{static_cast<std::uint8_t>(code)});
    ASSERT_EQ(static_cast<double>(value), std::ldexp(1.0, static_cast<int>(code) - 127));
    ASSERT_EQ(from_float<Float8E8M0>(value).bits, code);
  }
  EXPECT_TRUE(std::isnan(to_float(Float8E8M0{0xff})));
  EXPECT_EQ(from_float<Float8E8M0>(kNaN).bits, 0xff);
  EXPECT_EQ(from_float<Float8E8M0>(-kNaN).bits, 0xff);
}

TEST(Float8E8M0Test, RoundsToTheNearestPowerWithTiesToTheEvenCode) {
  for (unsigned code = 0; code < 254; ++code) {
    const float middle = static_cast<float>(std::ldexp(1.5, static_cast<int>(code) - 127));
    ASSERT_EQ(from_float<Float8E8M0>(middle).bits, code + code % 2) << code;
    ASSERT_EQ(from_float<Float8E8M0>(std::nextafter(middle, 0.f)).bits, code);
    ASSERT_EQ(from_float<Float8E8M0>(std::nextafter(middle, kInf)).bits, code + 1);
  }
}

TEST(Float8E8M0Test, WhatHasNoPowerOfTwoTakesTheNearestEnd) {
  for (const float x : {0.f, -0.f, -1.f, -kInf, std::numeric_limits<float>::denorm_min()}) {
    EXPECT_EQ(from_float<Float8E8M0>(x).bits, 0) << x;
  }
  EXPECT_EQ(from_float<Float8E8M0>(kInf).bits, 254);
  EXPECT_EQ(from_float<Float8E8M0>(std::numeric_limits<float>::max()).bits, 254);
}

TEST(DTypeTest, NamesParseBackAndUnknownOnesAreRefused) {
  for (int i = 0; i <= static_cast<int>(DType::i64); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
  }
  EXPECT_EQ(name_of(DType::bf16), "bf16");
  try {
    parse_dtype("float16");
    FAIL() << "float16 is no name here";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("float16"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("bf16"), std::string::npos);
  }
}

TEST(DTypeTest, PackedElementsRoundUpToWholeBytes) {
  EXPECT_EQ(bytes_of(DType::i4, 0), 0);
  EXPECT_EQ(bytes_of(DType::i4, 7), 4);
  EXPECT_EQ(bytes_of(DType::f4e2m1, 8), 4);
  EXPECT_EQ(bytes_of(DType::f16, 3), 6);
  EXPECT_EQ(bytes_of(DType::i64, std::int64_t{1} << 33), std::int64_t{1} << 36);
}

}  // namespace
}  // namespace fovea
