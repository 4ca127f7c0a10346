// Queries in fixed point, whose products with int8 add up to int32.
#include <cmath>
#include <limits>

#include "backend_cpu/cpu_test.h"
#include "backends/cpu/attend.h"

namespace fovea::test {
namespace {

TEST(FixedPoint, IsOffByHalfAStepAtMost) {
  for (const float largest : {1e-30f, 1.f, 3e38f}) {
    std::vector<float> x(300);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = largest * (2 * static_cast<float>(i) / static_cast<float>(x.size() - 1) - 1);
    }
    std::vector<std::int16_t> codes(x.size());
    const float step = cpu::to_fixed_point(x.data(), 300, 300, codes.data());
    EXPECT_FLOAT_EQ(largest / 32639, step);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double half_step = 0x1.02p-16 * static_cast<double>(largest);
      EXPECT_NEAR(x[i], codes[i] * static_cast<double>(step), half_step);
    }
  }
}

TEST(FixedPoint, SumsOfAnyProductsFitInt32) {
  for (const std::int64_t summed : {1, 512, 513, 4096}) {
    const std::vector<float> x(static_cast<std::size_t>(summed), -2.f);
    std::vector<std::int16_t> codes(x.size());
    cpu::to_fixed_point(x.data(), summed, summed, codes.data());
    std::int64_t sum = 0;
    for (const std::int16_t code : codes) sum += code * -128;
    EXPECT_LE(sum, std::numeric_limits<std::int32_t>::max()) << summed;
    EXPECT_GE(sum, summed * 128 * 4000) << summed;
  }
}

TEST(FixedPoint, ZerosAreZerosAndNaNIsNaN) {
  const float zeros[3] = {0, -0.f, 0};
  std::int16_t codes[3] = {1, 1, 1};
  EXPECT_EQ(0.f, cpu::to_fixed_point(zeros, 3, 3, codes));
  EXPECT_EQ(0, codes[0] | codes[1] | codes[2]);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::infinity()}) {
    const float x[3] = {1, bad, 1};
    EXPECT_TRUE(std::isnan(cpu::to_fixed_point(x, 3, 3, codes)));
    EXPECT_EQ(0, codes[0] | codes[1] | codes[2]);
  }
}

}  // namespace
}  // namespace fovea::test
