// The test helpers themselves: a comparison that cannot fail would make every other test worthless.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "support/compare.h"

namespace fovea::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(RowsCloseTest, NamesTheWorstElementOfTheWorstRow) {
  const double expected[] = {3, 4, 0, 5};
  const double got[] = {3, 4.1, 0.5, 4};
  const Tensor tensor = tensor_from(DType::f32, {2, 2}, got);
  const auto result = rows_close(expected, tensor, {0.01, 0});
  ASSERT_FALSE(result);
  const std::string message = result.message();
  EXPECT_NE(message.find("2 of 2 rows"), std::string::npos) << message;
  EXPECT_NE(message.find("[1, 1]: expected 5, got 4"), std::string::npos) << message;
  EXPECT_TRUE(rows_close(expected, tensor, {0.25, 0}));
}

TEST(RowsCloseTest, TheToleranceIsOfEachRowNotOfTheTensor) {
  const double expected[] = {1e6, 0, 1, 0};
  const double got[] = {1e6, 0, 1.1, 0};
  EXPECT_FALSE(rows_close(expected, tensor_from(DType::f32, {2, 2}, got), {0.01, 0}));
}

TEST(RowsCloseTest, NaNAndInfinityMustMatchOnBothSides) {
  const double with_nan[] = {1, kNaN};
  const double without[] = {1, 2};
  const double with_inf[] = {1, -kInf};
  const RowTolerance lax{1e3, 1e3};
  EXPECT_FALSE(rows_close(without, tensor_from(DType::f32, {1, 2}, with_nan), lax));
  EXPECT_FALSE(rows_close(with_nan, tensor_from(DType::f32, {1, 2}, without), lax));
  EXPECT_FALSE(rows_close(without, tensor_from(DType::f32, {1, 2}, with_inf), lax));
  EXPECT_TRUE(rows_close(with_nan, tensor_from(DType::f32, {1, 2}, with_nan), {}));
  EXPECT_TRUE(values_close(with_inf, tensor_from(DType::f32, {1, 2}, with_inf), 0));
  EXPECT_FALSE(values_close(with_inf, tensor_from(DType::f32, {1, 2}, without), 1e9, 1e9));
  EXPECT_FALSE(values_close(without, tensor_from(DType::f32, {1, 2}, with_nan), 1e9));
}

TEST(RowsCloseTest, ARowOfZerosMustBeZerosUnlessAnAbsoluteErrorIsAllowed) {
  const double expected[] = {0, 0};
  const double got[] = {0, 1e-20};
  EXPECT_FALSE(rows_close(expected, tensor_from(DType::f32, {1, 2}, got), {1, 0}));
  EXPECT_TRUE(rows_close(expected, tensor_from(DType::f32, {1, 2}, got), {0, 1e-19}));
}

TEST(CompareTest, AnotherNumberOfValuesFails) {
  const double expected[] = {0, 0, 0};
  EXPECT_FALSE(rows_close(expected, Tensor::zeros(DType::f32, {2}), {1, 1}));
  EXPECT_FALSE(values_close(expected, Tensor::zeros(DType::f32, {2}), 1));
}

TEST(BitsEqualTest, ZeroSignsAndNaNPayloadsCount) {
  const double plus[] = {0.0};
  const double minus[] = {-0.0};
  EXPECT_FALSE(bits_equal(tensor_from(DType::f32, {1}, plus), tensor_from(DType::f32, {1}, minus)));
  const double nan[] = {kNaN};
  const Tensor a = tensor_from(DType::bf16, {1}, nan);
  EXPECT_TRUE(bits_equal(a, tensor_from(DType::bf16, {1}, nan)));
  EXPECT_FALSE(bits_equal(a, Tensor::zeros(DType::f16, {1})));
}

TEST(PoisonTest, IsNaNInEveryFloatAndPaddingWritesAreSeen) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3fn, DType::f8e5m2}) {
    const PaddedTensor tensor(dtype, {2, 3});
    for (const double x : to_doubles(tensor)) EXPECT_TRUE(std::isnan(x)) << name_of(dtype);
    EXPECT_TRUE(tensor.padding_untouched());
    static_cast<std::byte*>(tensor.view().data)[3 * bits_of(dtype) / 8] = std::byte{0};
    EXPECT_FALSE(tensor.padding_untouched());
  }
}

TEST(FillTest, NormalValuesHaveTheirDeviationAndDoNotDependOnTheLayout) {
  const Tensor tensor = Tensor::empty(DType::f32, {100, 100});
  fill_normal(tensor, 1, 2.0);
  double sum = 0, squares = 0;
  for (const double x : to_doubles(tensor)) sum += x, squares += x * x;
  EXPECT_NEAR(sum / 1e4, 0, 0.08);
  EXPECT_NEAR(std::sqrt(squares / 1e4), 2, 0.08);
  const PaddedTensor padded(DType::f32, {100, 100});
  fill_normal(padded, 1, 2.0);
  EXPECT_TRUE(bits_equal(tensor, padded));
}

}  // namespace
}  // namespace fovea::test
