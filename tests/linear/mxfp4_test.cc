// Products with MXFP4 weights: exact weights, for one matrix and for heads.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "fovea/oracle.h"
#include "linear/plain_kernels.h"
#include "linear/product.h"
#include "linear/quantized_linear.h"
#include "support/compare.h"

namespace fovea {
namespace {

using test::PaddedTensor;

class Mxfp4Linear : public test::QuantizedLinear {};
INSTANTIATE_TEST_SUITE_P(, Mxfp4Linear,
                         testing::Combine(testing::ValuesIn(test::available_places()),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)),
                         test::place_case_name);

/// Every code, under scales of 2^-3 to 2^3.
OwnedQuantizedWeight mxfp4_weight(std::int64_t out, std::int64_t in, std::uint64_t seed) {
  OwnedQuantizedWeight weight{.codes = Tensor::empty(DType::u8, {out, in / 2}),
                              .scale = Tensor::empty(DType::f8e8m0, {out, in / 32}),
                              .groups = {1, 32}};
  const auto fill = [&](const TensorView& view, std::uint64_t stream, int low, int count) {
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      static_cast<std::uint8_t*>(view.data)[i] = static_cast<std::uint8_t>(
          low + test::random_below(stream, static_cast<std::uint64_t>(i), count));
    }
  };
  fill(weight.codes, seed, 0, 256);
  fill(weight.scale, seed + 1, 124, 7);
  return weight;
}

/// By the definition of e2m1 and e8m0.
std::vector<double> mxfp4_values(const QuantizedWeight& weight) {
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::vector<double> values;
  for (std::int64_t m = 0; m < weight.codes.shape[0]; ++m) {
    for (std::int64_t k = 0; k < weight.codes.shape[1] * 2; ++k) {
      const int byte = *weight.codes.ptr<std::uint8_t>({m, k / 2});
      const int code = k % 2 == 0 ? byte & 15 : byte >> 4;
      const int exponent = *weight.scale.ptr<std::uint8_t>({m, k / 32}) - 127;
      values.push_back((code & 8 ? -1 : 1) * std::ldexp(kMagnitudes[code & 7], exponent));
    }
  }
  return values;
}

TEST_P(Mxfp4Linear, WeightsAreDecodedExactly) {  // F031, F036
  constexpr std::int64_t kOut = 70, kIn = 320;
  const OwnedQuantizedWeight w = mxfp4_weight(kOut, kIn, 5);
  const std::vector<double> values = mxfp4_values(w);
  EXPECT_EQ(values, test::to_doubles(dequantize_weight(w, dtype())));
  const Linear linear(w, {}, dtype(), memory());
  EXPECT_EQ(name("mxfp4"), linear.backend_name());
  const std::int64_t columns = place_.is_gpu() ? kOut : 80;  // Whole panels on the host.
  EXPECT_EQ(columns * kIn / 2 + columns * kIn / 32 * 4, linear.weight_bytes());
  const PaddedTensor identity(dtype(), {kIn, kIn}), out(dtype(), {kIn, kOut});
  test::fill_normal(identity, 1, 0);
  for (std::int64_t i = 0; i < kIn; ++i) {
    test::fill_uniform(identity.view().slice(0, i, i + 1).slice(1, i, i + 1), 1, 1, 1);
  }
  run(linear, identity, out);
  const Tensor direct = dequantize_weight(w, dtype());
  EXPECT_EQ(test::to_doubles(direct.view().transpose(0, 1)), test::to_doubles(out));
  for (const std::int64_t tokens : {1, 5, 66}) {
    const PaddedTensor x(dtype(), {tokens, kIn}), y(dtype(), {tokens, kOut});
    test::fill_normal(x, 4);
    run(linear, x, y);
    const double tolerance = dtype() == DType::f32 ? 1e-5 : 2 * test::unit_roundoff(dtype());
    EXPECT_TRUE(test::rows_close(oracle::linear(test::to_doubles(x), values, {}, kIn), y,
                                 {tolerance, 1e-6}));
  }
}

TEST_P(Mxfp4Linear, HeadsReadTheirInputAsItIs) {
  constexpr std::int64_t kHeads = 3, kIn = 64, kOut = 48, kTokens = 5;
  std::vector<OwnedQuantizedWeight> weights;
  std::vector<QuantizedWeight> heads;
  for (std::uint64_t n = 0; n < kHeads; ++n) {
    weights.push_back(mxfp4_weight(kOut, kIn, 10 * n));
    heads.push_back(weights.back());
  }
  const BatchedLinear linear(heads, dtype(), memory());
  EXPECT_EQ(name("mxfp4"), linear.backend_name());
  const PaddedTensor x(dtype(), {kTokens, kHeads, kIn});
  const PaddedTensor out(dtype(), {kTokens, kHeads, kOut});
  test::fill_normal(x, 4);
  workspace_.reserve(linear.workspace_bytes(kTokens));
  linear(ctx(), x, out);
  for (std::int64_t n = 0; n < kHeads; ++n) {
    const auto expected =
        oracle::linear(test::to_doubles(x.view().select(1, n)),
                       mxfp4_values(heads[static_cast<std::size_t>(n)]), {}, kIn);
    const double tolerance = dtype() == DType::f32 ? 1e-5 : 2 * test::unit_roundoff(dtype());
    EXPECT_TRUE(test::rows_close(expected, out.view().select(1, n), {tolerance, 1e-6}));
  }
}

TEST(Mxfp4Weight, EachCodeIsTheNearest) {
  const PaddedTensor transposed(DType::bf16, {96, 40});
  test::fill_normal(transposed, 8);
  test::fill_uniform(transposed.view().slice(0, 0, 32).slice(1, 0, 1), 9, 0, 0);
  const TensorView weight = transposed.view().transpose(0, 1);
  const OwnedQuantizedWeight quantized = quantize_weight_mxfp4(weight);
  EXPECT_EQ(test::to_doubles(dequantize_weight(quantized, DType::f32)), mxfp4_values(quantized));
  const std::vector<double> expected = test::to_doubles(weight), got = mxfp4_values(quantized);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::int64_t group = static_cast<std::int64_t>(i) / 32;
    const int exponent = *quantized.scale.ptr<std::uint8_t>({group / 3, group % 3}) - 127;
    const double size = std::ldexp(std::abs(expected[i]), -exponent);
    const double half = size <= 2 ? 0.25 : size <= 4 ? 0.5 : 1;
    EXPECT_LE(std::abs(got[i] - expected[i]), std::ldexp(half, exponent)) << i;
  }
}

TEST(Mxfp4Product, ScalarKernelsHaveTheSameWeights) {
  const OwnedQuantizedWeight w = mxfp4_weight(20, 96, 3);
  const QuantizedWeight weight = w;
  const auto scalar = make_quantized_product(
      {.depth = 96, .columns = 20, .dtype = DType::f32, .is_mxfp4 = true}, w.groups,
      kPlainKernelsScalar);
  scalar->load({&weight, 1}, {});
  const PaddedTensor x(DType::f32, {3, 1, 96}), out(DType::f32, {3, 1, 20});
  test::fill_normal(x, 4);
  const auto pool = make_std_thread_pool(1);
  Workspace workspace;
  scalar->run({pool.get(), &workspace}, x, out);
  EXPECT_TRUE(test::rows_close(oracle::linear(test::to_doubles(x), mxfp4_values(weight), {}, 96),
                               out.view().select(1, 0), {1e-5, 1e-6}));
}

}  // namespace
}  // namespace fovea
