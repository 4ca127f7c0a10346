#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/quant.h"
#include "support/poison.h"

namespace fovea {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr DType kDTypes[] = {DType::i8, DType::i4, DType::f8e4m3fn, DType::f8e5m2, DType::f4e2m1};

bool has_nan(DType dtype) { return dtype == DType::f8e4m3fn || dtype == DType::f8e5m2; }

/// Every finite value of a dtype, from its definition.
std::vector<double> values_of(DType dtype) {
  std::vector<double> values;
  const auto add_floats = [&](int mantissa_bits, int bias, int codes) {
    for (int code = 0; code < codes; ++code) {
      const int exponent = code >> mantissa_bits;
      const double fraction = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
      const double value = exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                         : std::ldexp(1 + fraction, exponent - bias);
      values.push_back(value);
      values.push_back(-value);
    }
  };
  switch (dtype) {
    case DType::i8:
      for (int i = -128; i < 128; ++i) values.push_back(i);
      break;
    case DType::i4:
      for (int i = -8; i < 8; ++i) values.push_back(i);
      break;
    case DType::f8e4m3fn:
      add_floats(3, 7, 0x7f);
      break;
    case DType::f8e5m2:
      add_floats(2, 15, 0x7c);
      break;
    default:
      add_floats(1, 1, 8);
  }
  return values;
}

std::vector<float> round_trip(DType dtype, std::span<const float> values, float scale) {
  std::vector<std::byte> codes(
      static_cast<std::size_t>(bytes_of(dtype, static_cast<std::int64_t>(values.size()))),
      test::kPoison);
  quantize_group(dtype, values, scale, codes);
  std::vector<float> result(values.size(), kNaN);
  dequantize_group(dtype, codes, scale, result);
  return result;
}

std::vector<float> normals(std::uint64_t seed, std::size_t count) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>(test::random_normal(seed, i)));
  }
  return values;
}

TEST(GroupCodecTest, CodesHaveTheFormatsBytes) {
  const float values[] = {-8, 7, 3, -1, 5};
  std::vector<std::byte> codes(3, test::kPoison);
  quantize_group(DType::i4, values, 1.f, codes);
  EXPECT_EQ(codes, (std::vector{std::byte{0x78}, std::byte{0xf3}, std::byte{0x05}}));
  const float halves[] = {0.5f, -6, 3};
  codes.resize(2);
  quantize_group(DType::f4e2m1, halves, 1.f, codes);
  EXPECT_EQ(codes, (std::vector{std::byte{0xf1}, std::byte{0x05}}));
  const float bytes[] = {-1, 127};
  quantize_group(DType::i8, bytes, 1.f, codes);
  EXPECT_EQ(codes, (std::vector{std::byte{0xff}, std::byte{0x7f}}));
}

// B137
TEST(GroupCodecTest, TheScaleMultipliesTheStoredValue) {
  const float value[] = {8};
  for (const DType dtype : kDTypes) {
    std::vector<std::byte> codes(1);
    quantize_group(dtype, value, 4.f, codes);
    float stored[1];
    dequantize_group(dtype, codes, 1.f, stored);
    EXPECT_EQ(stored[0], 2.f) << name_of(dtype);
    dequantize_group(dtype, codes, 4.f, stored);
    EXPECT_EQ(stored[0], 8.f) << name_of(dtype);
  }
}

TEST(GroupCodecTest, EveryStoredValueSurvivesAnyPowerOfTwoScale) {
  for (const DType dtype : kDTypes) {
    for (const float scale : {1.f, 0x1p-9f, 0x1p20f}) {
      std::vector<float> values;
      for (const double value : values_of(dtype))
        values.push_back(static_cast<float>(value) * scale);
      EXPECT_EQ(round_trip(dtype, values, scale), values) << name_of(dtype) << " " << scale;
    }
  }
}

TEST(GroupCodecTest, QuotientsGoToTheNearestStoredValue) {
  const std::vector<float> values = normals(1, 4096);
  for (const DType dtype : kDTypes) {
    const float scale = group_scale(dtype, values);
    const std::vector<double> stored = values_of(dtype);
    const std::vector<float> got = round_trip(dtype, values, scale);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double quotient = static_cast<double>(values[i] / scale);
      double best = kInf;
      for (const double candidate : stored) best = std::min(best, std::abs(candidate - quotient));
      const double error = std::abs(static_cast<double>(got[i] / scale) - quotient);
      // got / scale rounds twice.
      ASSERT_LE(error, best + std::abs(quotient) * 0x1p-22) << name_of(dtype) << " " << values[i];
    }
  }
}

TEST(GroupCodecTest, TiesGoToEven) {
  const float values[] = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 126.5f, 5.5f};
  EXPECT_EQ(round_trip(DType::i8, values, 1.f), (std::vector<float>{0, 2, 2, 0, -2, -2, 126, 6}));
  // f4e2m1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6: even codes are 0, 1, 2 and 4.
  const float fours[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5, -5};
  EXPECT_EQ(round_trip(DType::f4e2m1, fours, 1.f), (std::vector<float>{0, 1, 1, 2, 2, 4, 4, -4}));
}

// B128, B129
TEST(GroupCodecTest, WhatIsTooLargeSaturatesInfinitiesToo) {
  const float values[] = {1e4f, -1e4f, 1e30f, -1e30f, kInf, -kInf};
  for (const DType dtype : {DType::i8, DType::i4, DType::f8e4m3fn, DType::f4e2m1}) {
    const float high = largest_code_value(dtype);
    const float low = dtype == DType::i8 ? -128.f : dtype == DType::i4 ? -8.f : -high;
    EXPECT_EQ(round_trip(dtype, values, 1.f), (std::vector<float>{high, low, high, low, high, low}))
        << name_of(dtype);
  }
  const std::vector<float> wide = round_trip(DType::f8e5m2, values, 1.f);
  EXPECT_EQ(wide[2], 57344.f);
  EXPECT_EQ(wide[5], -57344.f);
}

TEST(GroupCodecTest, TheScaleMapsTheLargestMagnitudeToTheLargestCode) {
  const float largest[] = {127, 7, 448, 57344, 6};
  const float values[] = {0.25f, -3.5f, kInf, 1.f, -kInf};
  for (std::size_t i = 0; i < std::size(kDTypes); ++i) {
    EXPECT_EQ(largest_code_value(kDTypes[i]), largest[i]);
    EXPECT_EQ(group_scale(kDTypes[i], values), 3.5f / largest[i]) << name_of(kDTypes[i]);
  }
}

TEST(GroupCodecTest, ZerosAndTinyValuesHaveAFiniteScaleAndInverse) {
  const std::vector<std::vector<float>> groups = {{}, {0, -0.f, 0}, {1e-44f, -1e-44f}, {1e-38f}};
  for (const DType dtype : kDTypes) {
    for (const std::vector<float>& values : groups) {
      const float scale = group_scale(dtype, values);
      EXPECT_GE(scale, FLT_MIN) << name_of(dtype);
      EXPECT_TRUE(std::isfinite(1 / scale)) << name_of(dtype);
      const std::vector<float> got = round_trip(dtype, values, scale);
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_LE(std::abs(got[i] - values[i]), FLT_MIN) << name_of(dtype);
        if (values[i] == 0) {
          EXPECT_EQ(got[i], 0) << name_of(dtype);
        }
      }
    }
  }
}

TEST(GroupCodecTest, ANaNIsNeverHidden) {
  const float values[] = {1, kNaN, -2};
  for (const DType dtype : kDTypes) {
    const float scale = group_scale(dtype, values);
    const std::vector<float> got = round_trip(dtype, values, scale);
    EXPECT_TRUE(std::isnan(got[1])) << name_of(dtype);
    EXPECT_EQ(std::isnan(got[0]), !has_nan(dtype)) << name_of(dtype);
    EXPECT_EQ(std::isnan(got[2]), !has_nan(dtype)) << name_of(dtype);
  }
}

TEST(GroupCodecTest, OldBytesDoNotShowThrough) {
  const std::vector<float> values = normals(2, 33);
  for (const DType dtype : kDTypes) {
    const auto bytes = static_cast<std::size_t>(bytes_of(dtype, 33));
    std::vector<std::byte> over_zeros(bytes, std::byte{0}), over_ones(bytes, std::byte{0xff});
    quantize_group(dtype, values, 0.03f, over_zeros);
    quantize_group(dtype, values, 0.03f, over_ones);
    EXPECT_EQ(over_zeros, over_ones) << name_of(dtype);
  }
}

TEST(GroupCodecTest, BadArgumentsAreRefusedBeforeAnythingIsWritten) {
  const float values[] = {1, 2, 3};
  std::vector<std::byte> codes(2, test::kPoison);
  for (const float scale : {0.f, -1.f, kInf}) {
    EXPECT_THROW(quantize_group(DType::i4, values, scale, codes), Error) << scale;
  }
  EXPECT_THROW(quantize_group(DType::i8, values, 1.f, codes), Error);
  EXPECT_THROW(quantize_group(DType::bf16, values, 1.f, codes), Error);
  EXPECT_TRUE(test::still_poisoned(codes.data(), 2));
  float out[4] = {};
  EXPECT_THROW(dequantize_group(DType::i8, codes, 1.f, out), Error);
  EXPECT_THROW(dequantize_group(DType::f32, codes, 1.f, out), Error);
  EXPECT_THROW(largest_code_value(DType::f8e8m0), Error);
  for (const DType dtype : kDTypes) EXPECT_TRUE(is_quantized_dtype(dtype));
  EXPECT_FALSE(is_quantized_dtype(DType::f8e8m0));
  EXPECT_FALSE(is_quantized_dtype(DType::f32));
}

}  // namespace
}  // namespace fovea
