// Products with FP8 weights: exact weights, groups of any shape, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <tuple>

#include "fovea/error.h"
#include "fovea/linear.h"
#include "fovea/oracle.h"
#include "fovea/quant.h"
#include "fovea/thread_pool.h"
#include "linear/plain_kernels.h"
#include "linear/product.h"
#include "linear/quantized_linear.h"
#include "support/compare.h"

namespace fovea {
namespace {

using test::PaddedTensor;
using test::QuantizedLinear;

/// Random codes that are no NaN, and scales that are no powers of two.
struct Weight {
  Weight(std::int64_t out, std::int64_t in, const WeightGroups& groups, DType scale_dtype)
      : codes(DType::f8e4m3fn, {out, in}),
        scale(scale_dtype, {groups.out == 0 ? 1 : (out + groups.out - 1) / groups.out,
                            groups.in == 0 ? 1 : (in + groups.in - 1) / groups.in}),
        weight{codes, scale, groups} {
    for (std::int64_t m = 0; m < out; ++m) {
      for (std::int64_t k = 0; k < in; ++k) {
        const auto n = static_cast<std::uint64_t>(m * in + k);
        auto code = static_cast<std::uint8_t>(test::random_below(5, n, 254));
        if (code >= 0x7f) ++code;  // Leaves out both NaNs.
        *codes.view().ptr<std::uint8_t>({m, k}) = code;
      }
    }
    test::fill_uniform(scale, 6, 0.001, 0.003);
  }

  std::vector<double> values() const {
    const std::int64_t out = codes.view().shape[0], in = codes.view().shape[1];
    const std::vector<double> scales = test::to_doubles(scale);
    const auto columns = scale.view().shape[1];
    std::vector<double> all;
    for (std::int64_t m = 0; m < out; ++m) {
      const std::vector<double> row =
          oracle::decode(codes.view().ptr<std::uint8_t>({m, 0}), in, oracle::Format::f8e4m3fn);
      for (std::int64_t k = 0; k < in; ++k) {
        const std::int64_t i = weight.groups.out == 0 ? 0 : m / weight.groups.out;
        const std::int64_t j = weight.groups.in == 0 ? 0 : k / weight.groups.in;
        all.push_back(row[static_cast<std::size_t>(k)] *
                      scales[static_cast<std::size_t>(i * columns + j)]);
      }
    }
    return all;
  }

  PaddedTensor codes, scale;
  QuantizedWeight weight;
};

constexpr WeightGroups kGroups[] = {{0, 0}, {1, 0}, {128, 128}, {64, 128}, {32, 48}, {128, 0}};

INSTANTIATE_TEST_SUITE_P(, QuantizedLinear,
                         testing::Combine(testing::ValuesIn(test::available_places()),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)),
                         test::place_case_name);

TEST_P(QuantizedLinear, TheIdentityGivesTheDequantisedWeight) {  // F036, F359
  constexpr std::int64_t kOut = 70, kIn = 300;
  for (const WeightGroups& groups : kGroups) {
    for (DType scale_dtype : {DType::f32, DType::bf16}) {
      const Weight w(kOut, kIn, groups, scale_dtype);
      const Tensor direct = dequantize_weight(w.weight, dtype());
      EXPECT_TRUE(test::values_close(w.values(), direct, 0x1p-25,
                                     test::unit_roundoff(dtype()) + 0x1p-24));
      const Linear linear(w.weight, {}, dtype(), memory());
      const PaddedTensor identity(dtype(), {kIn, kIn}), out(dtype(), {kIn, kOut});
      test::fill_normal(identity, 1, 0);
      for (std::int64_t i = 0; i < kIn; ++i) {
        test::fill_uniform(identity.view().slice(0, i, i + 1).slice(1, i, i + 1), 1, 1, 1);
      }
      run(linear, identity, out);
      EXPECT_EQ(test::to_doubles(direct.view().transpose(0, 1)), test::to_doubles(out))
          << "groups of " << groups.out << ", " << groups.in;
    }
  }
}

class CodeProducts : public QuantizedLinear {
 protected:
  /// Of a weight [70, in], with rows of x `padding` elements apart and behind as many.
  void expect_formula(const WeightGroups& groups, std::int64_t in,
                      std::initializer_list<std::int64_t> tokens,
                      std::initializer_list<std::int64_t> paddings) {
    constexpr std::int64_t kOut = 70;
    const Weight w(kOut, in, groups, DType::f32);
    const PaddedTensor bias(dtype(), {kOut});
    test::fill_normal(bias, 3);
    const Linear linear(w.weight, bias, dtype(), memory());
    EXPECT_EQ(name("fp8"), linear.backend_name());
    const double tolerance = dtype() == DType::f32 ? 1e-5 : 2 * test::unit_roundoff(dtype());
    for (const std::int64_t count : tokens) {
      for (const std::int64_t padding : paddings) {
        const PaddedTensor x(dtype(), {count, in}, padding, padding), out(dtype(), {count, kOut});
        test::fill_normal(x, 4);
        run(linear, x, out);
        const auto expected =
            oracle::linear(test::to_doubles(x), w.values(), test::to_doubles(bias), in);
        EXPECT_TRUE(test::rows_close(expected, out, {tolerance, 1e-6}))
            << count << " tokens, padding " << padding << ", groups of " << groups.out << ", "
            << groups.in;
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(, CodeProducts,
                         testing::Combine(testing::ValuesIn(test::available_places()),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)),
                         test::place_case_name);

TEST_P(CodeProducts, EqualTheFormula) {
  for (const WeightGroups& groups : kGroups) {
    expect_formula(groups, 300, {1, 2, 3, 5, 7, 64, 65, 130}, {5});
  }
}

// A GPU reads codes in place for up to 64 tokens, in tiles of 8 tokens and 32 outputs, 64 channels
// at a time, from rows that lie at multiples of 16 bytes or do not.
TEST_P(CodeProducts, OfFewTokensAndOfManyEqualTheFormula) {
  for (const WeightGroups& groups : {WeightGroups{64, 128}, {1, 0}, {48, 64}}) {
    expect_formula(groups, 1088, {1, 8, 9, 16, 17, 64, 65}, {8, 3});
  }
}

TEST(QuantizedProduct, ScalarKernelsHaveTheSameWeights) {
  const Weight w(20, 130, {16, 64}, DType::f32);
  const ProductShape shape{.depth = 130, .columns = 20, .dtype = DType::f32};
  const auto scalar = make_quantized_product(shape, w.weight.groups, kPlainKernelsScalar);
  scalar->load({&w.weight, 1}, {});
  const PaddedTensor x(DType::f32, {3, 1, 130}), out(DType::f32, {3, 1, 20});
  test::fill_normal(x, 4);
  const auto pool = make_std_thread_pool(1);
  Workspace workspace;
  scalar->run({pool.get(), &workspace}, x, out);
  EXPECT_TRUE(test::rows_close(oracle::linear(test::to_doubles(x), w.values(), {}, 130),
                               out.view().select(1, 0), {1e-5, 1e-6}));
}

TEST_P(QuantizedLinear, WeightsTakeAByteAndTheirScales) {
  const Weight w(128, 256, {128, 128}, DType::f32);
  const int scales = (place_.is_gpu() ? 1 : 128) * 2;  // On the host each row has its own.
  EXPECT_EQ(128 * 256 + scales * 4, Linear(w.weight, {}, dtype(), memory()).weight_bytes());
}

TEST_P(QuantizedLinear, ANaNCodeStaysVisible) {
  for (const std::int64_t in : {32, 64}) {  // A GPU reads codes in place from 64 on.
    Weight w(20, in, {0, 0}, DType::f32);
    *w.codes.view().ptr<std::uint8_t>({7, 3}) = 0x7f;
    const Linear linear(w.weight, {}, dtype(), memory());
    const PaddedTensor x(dtype(), {2, in}), out(dtype(), {2, 20});
    test::fill_normal(x, 4);
    test::poison(x.view().slice(0, 1, 2).slice(1, 5, 6));
    run(linear, x, out);
    const std::vector<double> y = test::to_doubles(out);
    for (std::size_t m = 0; m < 40; ++m) EXPECT_EQ(m == 7 || m >= 20, std::isnan(y[m])) << m;
  }
}

TEST_P(QuantizedLinear, ReloadKeepsStorageAndGroups) {
  const Weight first(40, 64, {32, 32}, DType::f32);
  Weight second(40, 64, {32, 32}, DType::f32);
  test::fill_uniform(second.scale, 9, 0.01, 0.02);
  Linear linear(first.weight, {}, dtype(), memory());
  linear.reload(second.weight, {});
  const PaddedTensor x(dtype(), {2, 64}), out(dtype(), {2, 40}), fresh(dtype(), {2, 40});
  test::fill_normal(x, 4);
  run(linear, x, out);
  run(Linear(second.weight, {}, dtype(), memory()), x, fresh);
  EXPECT_EQ(test::to_doubles(fresh), test::to_doubles(out));
}

/// Rows of x as FP8 in groups of `width` channels, decoded by the oracle.
std::vector<double> rounded_rows(const TensorView& x, std::int64_t width) {
  std::vector<double> result;
  for (std::int64_t t = 0; t < x.shape[0]; ++t) {
    for (std::int64_t k = 0; k < x.shape[1]; k += width) {
      std::vector<float> values;
      for (double value : test::to_doubles(x.select(0, t).slice(0, k, k + width))) {
        values.push_back(static_cast<float>(value));
      }
      float largest = 0;
      for (float value : values) largest = std::max(largest, std::abs(value));
      const float scale = largest / 448;
      std::vector<std::byte> codes(values.size());
      quantize_group(DType::f8e4m3fn, values, scale, codes);
      for (double code : oracle::decode(codes.data(), width, oracle::Format::f8e4m3fn)) {
        result.push_back(code * double{scale});
      }
    }
  }
  return result;
}

TEST_P(QuantizedLinear, HeadsOfBlockScaledProductsEqualTheFormula) {  // F171
  constexpr std::int64_t kHeads = 3, kIn = 256, kOut = 128;
  std::vector<Weight> weights;
  std::vector<QuantizedWeight> heads;
  weights.reserve(kHeads);
  for (std::int64_t n = 0; n < kHeads; ++n) {
    weights.emplace_back(kOut, kIn, WeightGroups{128, 128}, DType::f32);
    test::fill_uniform(weights.back().scale, 20 + static_cast<std::uint64_t>(n), 0.001, 0.003);
    heads.push_back(weights.back().weight);
  }
  BatchedLinear linear(heads, dtype(), memory());
  EXPECT_EQ(name("fp8"), linear.backend_name());
  const std::int64_t scales = (place_.is_gpu() ? 1 : kOut) * 2;
  EXPECT_EQ(kHeads * (kOut * kIn + scales * 4), linear.weight_bytes());
  const auto run = [&](std::int64_t tokens) {
    const PaddedTensor x(dtype(), {tokens, kHeads, kIn}),
        out(dtype(), {tokens, kHeads, kOut});
    test::fill_normal(x, 4);
    workspace_.reserve(linear.workspace_bytes(tokens));
    test::poison(workspace_);
    workspace_.reset_peak();
    linear(ctx(), x, out);
    EXPECT_EQ(workspace_.peak(), linear.workspace_bytes(tokens));
    EXPECT_TRUE(out.padding_untouched());
    for (std::int64_t n = 0; n < kHeads; ++n) {
      const auto rows = rounded_rows(x.view().select(1, n), 128);
      const auto expected =
          oracle::linear(rows, weights[static_cast<std::size_t>(n)].values(), {}, kIn);
      const double tolerance =
          dtype() == DType::f32 ? 1e-5 : 2 * test::unit_roundoff(dtype());
      EXPECT_TRUE(test::rows_close(expected, out.view().select(1, n), {tolerance, 1e-6}))
          << tokens << " tokens, head " << n;
    }
  };
  for (std::int64_t tokens : {1, 5, 66}) run(tokens);
  std::swap(weights[0], weights[2]);
  std::swap(heads[0], heads[2]);
  linear.reload(heads);
  run(3);
}

TEST(QuantizeWeight, EachGroupIsWithinHalfAStepOfItsLargest) {  // F043, F359
  for (const WeightGroups& groups : kGroups) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      constexpr std::int64_t kOut = 130, kIn = 200;
      const PaddedTensor transposed(dtype, {kIn, kOut});
      test::fill_normal(transposed, 8);
      // A group of zeros, and one of large values beside small ones.
      test::fill_uniform(transposed.view().slice(0, 0, 128).slice(1, 0, 128), 9, 0, 0);
      test::fill_uniform(transposed.view().slice(0, 128, 200).slice(1, 128, 130), 9, -1e4, 1e4);
      const TensorView weight = transposed.view().transpose(0, 1);
      const OwnedQuantizedWeight quantized = quantize_weight(weight, groups);
      const std::vector<double> got = test::to_doubles(dequantize_weight(quantized, DType::f32));
      const std::vector<double> expected = test::to_doubles(weight);
      std::vector<double> largest(expected.size());  // Of the group, by its first element.
      const auto first_of = [&](std::int64_t m, std::int64_t k) {
        const std::int64_t row = groups.out == 0 ? 0 : m / groups.out * groups.out;
        const std::int64_t column = groups.in == 0 ? 0 : k / groups.in * groups.in;
        return static_cast<std::size_t>(row * kIn + column);
      };
      for (std::int64_t m = 0; m < kOut; ++m) {
        for (std::int64_t k = 0; k < kIn; ++k) {
          double& group = largest[first_of(m, k)];
          group = std::max(group, std::abs(expected[static_cast<std::size_t>(m * kIn + k)]));
        }
      }
      for (std::int64_t m = 0; m < kOut; ++m) {
        for (std::int64_t k = 0; k < kIn; ++k) {
          const auto i = static_cast<std::size_t>(m * kIn + k);
          const double group = largest[first_of(m, k)];
          // Half a step: 2^-4 of the value, or of the smallest normal code, 2^-6 of 448.
          const double limit = 0x1.0001p-4 * std::max(std::abs(expected[i]), group * 0x1p-6 / 448);
          ASSERT_LE(std::abs(got[i] - expected[i]), limit)
              << "[" << m << ", " << k << "] in groups of " << groups.out << ", " << groups.in;
          if (std::abs(expected[i]) == group) {
            ASSERT_NEAR(got[i], expected[i], group * 0x1p-23);
          }
        }
      }
    }
  }
}

TEST(QuantizedWeight, WhatDoesNotFitIsNamed) {
  Weight w(40, 64, {32, 32}, DType::f32);
  const auto error_of = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(ErrorCode::invalid_argument, error.code());
      return error.what();
    }
    return "";
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos ? testing::AssertionSuccess()
                                                : testing::AssertionFailure() << text;
  };
  QuantizedWeight wrong = w.weight;
  wrong.groups = {16, 32};
  EXPECT_TRUE(contains(error_of([&] { check_quantized_weight(wrong); }), "[3, 2]"));
  wrong.groups = {-1, 32};
  EXPECT_TRUE(contains(error_of([&] { check_quantized_weight(wrong); }), "groups are [-1, 32]"));
  wrong = w.weight;
  wrong.codes.dtype = DType::i8;
  EXPECT_TRUE(contains(error_of([&] { check_quantized_weight(wrong); }), "must be f8e4m3fn"));
  wrong.codes.dtype = DType::u8;
  EXPECT_TRUE(contains(error_of([&] { check_quantized_weight(wrong); }), "must be [1, 32]"));
  const QuantizedWeight mxfp4{wrong.codes.slice(1, 0, 32), w.scale, {1, 32}};
  EXPECT_TRUE(contains(error_of([&] { check_quantized_weight(mxfp4); }), "must be f8e8m0 [40, 2]"));
  EXPECT_TRUE(contains(error_of([&] { quantize_weight_mxfp4(w.scale); }), "whole groups of 32"));
  EXPECT_TRUE(contains(error_of([&] { Linear(w.weight, {}, DType::i8); }), "dtype is i8"));
  EXPECT_TRUE(contains(error_of([&] { quantize_weight(w.codes, {}); }), "weight is f8e4m3fn"));
  EXPECT_TRUE(contains(error_of([&] { quantize_weight(w.scale, {0, -4}); }), "[0, -4]"));
  Linear linear(w.weight, {}, DType::f32);
  const Tensor dense = Tensor::zeros(DType::f32, {40, 64});
  EXPECT_TRUE(contains(error_of([&] { linear.reload(dense, {}); }), "made with a quantised one"));
  // A group that would be cut has no place in a block-scaled product.
  const QuantizedWeight narrow[] = {w.weight};
  EXPECT_TRUE(contains(error_of([&] { BatchedLinear(narrow, DType::f32); }),  // F357
                       "must be whole groups of [32, 32]"));
  EXPECT_TRUE(contains(error_of([&] { BatchedLinear({}, DType::f32); }), "at least one"));
  wrong = w.weight;
  wrong.groups = {32, 0};
  wrong.scale = w.scale.view().slice(1, 0, 1);
  EXPECT_TRUE(contains(error_of([&] { linear.reload(wrong, {}); }), "groups of [32, 0]"));
}

}  // namespace
}  // namespace fovea
