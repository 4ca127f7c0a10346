// Conversions and row kernels against core's exact scalars.
#include <bit>
#include <cmath>
#include <cstdint>

#include "backend_cpu/cpu_test.h"
#include "fovea/dtype.h"
#include "support/poison.h"

namespace fovea::test {
namespace {

class RowKernels : public IsaTest {
 protected:
  template <class T>
  void check_all_codes() {
    constexpr std::int64_t kCodes = 65536;
    std::vector<T> codes(kCodes);
    for (std::int64_t i = 0; i < kCodes; ++i) {
      codes[static_cast<std::size_t>(i)].bits = static_cast<std::uint16_t>(i);
    }
    std::vector<float> loaded(kCodes);
    const auto d = static_cast<std::size_t>(dtype_of<T>);
    kernels().load[d](codes.data(), kCodes, loaded.data());
    std::vector<T> stored(kCodes);
    kernels().store[d](loaded.data(), 1.f, kCodes, stored.data());
    for (std::size_t i = 0; i < kCodes; ++i) {
      const float expected = to_float(codes[i]);
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(loaded[i])) << "code " << i;
        EXPECT_TRUE(std::isnan(to_float(stored[i]))) << "code " << i;
      } else {
        EXPECT_EQ(std::bit_cast<std::uint32_t>(expected), std::bit_cast<std::uint32_t>(loaded[i]))
            << "code " << i;
        EXPECT_EQ(codes[i].bits, stored[i].bits) << "code " << i;
      }
    }
  }

  /// Every code's value, the midpoint to the next, and the floats beside the midpoint.
  template <class T>
  void check_rounding() {
    std::vector<float> values;
    for (std::uint32_t code = 0; code < 65535; ++code) {
      T low, high;
      low.bits = static_cast<std::uint16_t>(code);
      high.bits = static_cast<std::uint16_t>(code + 1);
      const float middle = static_cast<float>(
          (static_cast<double>(to_float(low)) + static_cast<double>(to_float(high))) / 2);
      if (!std::isfinite(middle)) continue;
      values.insert(values.end(),
                    {middle, std::nextafter(middle, -INFINITY), std::nextafter(middle, INFINITY)});
    }
    for (float x : {3.4028235e38f, 1e38f, 65504.f, 65519.996f, 65520.f, 65536.f, 1e-45f, 0.f}) {
      values.insert(values.end(), {x, -x});
    }
    std::vector<T> stored(values.size());
    kernels().store[static_cast<std::size_t>(dtype_of<T>)](
        values.data(), 1.f, static_cast<std::int64_t>(values.size()), stored.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(from_float<T>(values[i]).bits, stored[i].bits) << values[i];
    }
  }
};
FOVEA_FOR_EACH_ISA(RowKernels);

TEST_P(RowKernels, EveryCodeOfF16AndBf16LoadsExactlyAndStoresBack) {
  check_all_codes<Float16>();
  check_all_codes<BFloat16>();
}

TEST_P(RowKernels, StoresRoundToNearestEven) {
  check_rounding<Float16>();
  check_rounding<BFloat16>();
}

TEST_P(RowKernels, RowsOfAnyWidthTouchNothingBehindTheirEnd) {
  for (std::int64_t n = 0; n <= 40; ++n) {
    std::vector<BFloat16> row(static_cast<std::size_t>(n) + 8, BFloat16{0x7fff});
    for (std::int64_t i = 0; i < n; ++i) {
      row[static_cast<std::size_t>(i)] = from_float<BFloat16>(static_cast<float>(i + 1));
    }
    const std::int64_t padded = (n + kernels().lanes - 1) / kernels().lanes * kernels().lanes;
    std::vector<float> loaded(static_cast<std::size_t>(padded) + 1, -7.f);
    constexpr auto kBf16 = static_cast<std::size_t>(DType::bf16);
    kernels().load[kBf16](row.data(), n, loaded.data());
    for (std::int64_t i = 0; i <= padded; ++i) {
      const float expected = i < n ? static_cast<float>(i + 1) : i < padded ? 0.f : -7.f;
      EXPECT_EQ(expected, loaded[static_cast<std::size_t>(i)]) << "width " << n << ", " << i;
    }
    kernels().store[kBf16](loaded.data(), 2.f, n, row.data());
    for (std::int64_t i = 0; i < n + 8; ++i) {
      const std::uint16_t expected =
          i < n ? from_float<BFloat16>(2.f * static_cast<float>(i + 1)).bits : 0x7fff;
      EXPECT_EQ(expected, row[static_cast<std::size_t>(i)].bits) << "width " << n << ", " << i;
    }
    EXPECT_EQ(static_cast<float>(n * (n + 1) * (2 * n + 1) / 6),
              kernels().sum_squares[static_cast<std::size_t>(DType::f32)](loaded.data(), n));
  }
}

}  // namespace
}  // namespace fovea::test
