#include "core/divisor.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace fovea::test {
namespace {

constexpr std::int64_t kLargest = INT32_MAX;

/// Around multiples of the divisor, at both ends and somewhere.
void expect_right(std::int64_t value, std::mt19937& random) {
  const Divisor divisor(value);
  const std::int64_t multiple = kLargest / value * value;
  for (const std::int64_t n :
       {std::int64_t{0}, value - 1, value, value + 1, 2 * value - 1, 2 * value, multiple - 1,
        multiple, kLargest, static_cast<std::int64_t>(random() >> 1)}) {
    if (n > kLargest) continue;
    ASSERT_EQ(divisor.quotient(static_cast<std::uint32_t>(n)), n / value) << n << " / " << value;
    ASSERT_EQ(divisor.remainder(static_cast<std::uint32_t>(n)), n % value) << n << " % " << value;
  }
}

TEST(Divisor, IsExactBelow2To31) {
  std::mt19937 random(1);
  for (std::int64_t value = 1; value < 5000; ++value) expect_right(value, random);
  for (int shift = 12; shift < 31; ++shift) {
    for (int offset = -1; offset < 2; ++offset) {
      expect_right((std::int64_t{1} << shift) + offset, random);
    }
    expect_right((std::int64_t{1} << shift) + random() % (1u << shift), random);
  }
  expect_right(kLargest, random);
}

}  // namespace
}  // namespace fovea::test
