// MXFP4 groups: nearest codes under the scale of their largest, and groups that have no such one.
#include "quant/mxfp4.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/float_bits.h"
#include "fovea/quant.h"
#include "support/poison.h"

namespace fovea {
namespace {

struct Group {
  explicit Group(const std::vector<float>& from) : values(from), codes(from.size() / 2) {
    scale = encode_mxfp4_group(values, codes);
  }
  /// By the definition of e2m1, two codes a byte.
  double decoded(std::size_t i) const {
    constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int byte = std::to_integer<int>(codes[i / 2]);
    const int code = i % 2 == 0 ? byte & 15 : byte >> 4;
    return (code & 8 ? -1 : 1) * kMagnitudes[code & 7] * std::ldexp(1.0, scale.bits - 127);
  }

  std::vector<float> values;
  std::vector<std::byte> codes;
  Float8E8M0 scale;
};

std::vector<float> group_of(std::initializer_list<float> first) {
  std::vector<float> values(first);
  values.resize(kMxfp4Group, 0.f);
  return values;
}

TEST(Mxfp4, TheLargestLiesBetweenThreeAndAHalfAndSevenSteps) {
  for (const float amax : {3.5f, 4.f, 6.f, 6.99f}) {
    EXPECT_EQ(127, Group(group_of({amax})).scale.bits);
  }
  EXPECT_EQ(128, Group(group_of({7.f})).scale.bits);
  EXPECT_EQ(126, Group(group_of({3.49f})).scale.bits);
  EXPECT_EQ(127 + 10, Group(group_of({-6 * 0x1p10f})).scale.bits);
}

TEST(Mxfp4, EveryValueIsWithinHalfAStep) {
  for (const double magnitude : {1e-30, 1e-3, 1.0, 3e4, 1e37}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      std::vector<float> values(kMxfp4Group);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(magnitude * test::random_normal(seed, i));
      }
      const Group group(values);
      const double step = std::ldexp(1.0, group.scale.bits - 127);
      for (std::size_t i = 0; i < values.size(); ++i) {
        // Codes lie half a step apart up to 2, a step up to 4, two steps up to 6 and on.
        const double size = std::abs(static_cast<double>(values[i])) / step;
        const double half = size <= 2 ? 0.25 : size <= 4 ? 0.5 : 1;
        EXPECT_LE(std::abs(group.decoded(i) - static_cast<double>(values[i])), half * step);
      }
    }
  }
}

TEST(Mxfp4, AllCodesComeBack) {
  std::vector<float> values;
  for (const float magnitude : {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f}) {
    for (const float sign : {1.f, -1.f}) values.push_back(sign * magnitude * 0x1p-9f);
  }
  values.insert(values.end(), values.begin(), values.end());
  const Group group(values);
  std::vector<float> decoded(values.size());
  dequantize_group(DType::f4e2m1, group.codes, widen(group.scale), decoded);
  EXPECT_EQ(values, decoded);
}

TEST(Mxfp4, ZerosSmallHugeAndNoNumbers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Group zeros(group_of({}));
  EXPECT_EQ(0, zeros.scale.bits);
  for (std::size_t i = 0; i < zeros.values.size(); ++i) EXPECT_EQ(0, zeros.decoded(i));
  // 2^-127 is the smallest scale: of denormals a step is as good as it gets.
  const Group denormal(group_of({0x1p-127f, 1e-45f}));
  EXPECT_EQ(0, denormal.scale.bits);
  EXPECT_EQ(0x1p-127, denormal.decoded(0));
  EXPECT_EQ(0, denormal.decoded(1));
  const Group largest(group_of({1e38f}));
  EXPECT_EQ(127 + 124, largest.scale.bits);
  EXPECT_NEAR(largest.decoded(0), 1e38, 0x1p124);
  const Group infinite(group_of({kInfinity, 3.f}));
  EXPECT_EQ(Group(group_of({0.f, 3.f})).scale.bits, infinite.scale.bits);
  EXPECT_EQ(6 * std::ldexp(1.0, infinite.scale.bits - 127), infinite.decoded(0));
  const Group unknown(group_of({1.f, std::numeric_limits<float>::quiet_NaN()}));
  EXPECT_EQ(0xff, unknown.scale.bits);
}

}  // namespace
}  // namespace fovea
