#include "linear/product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "fovea/oracle.h"
#include "fovea/thread_pool.h"
#include "linear/places.h"
#include "linear/plain_kernels.h"
#include "support/compare.h"
#include "support/malloc_counter.h"

namespace fovea {
namespace {

using test::PaddedTensor;

enum class Maker { plain_scalar, plain_best, onednn, cublaslt };

std::unique_ptr<DenseProduct> make_on_host(Maker maker, const ProductShape& shape) {
  switch (maker) {
    case Maker::plain_scalar:
      return make_plain_product(shape, kPlainKernelsScalar);
    case Maker::plain_best:
      return make_plain_product(shape);
    default:
      return make_onednn_product(shape);
  }
}

class ProductTest : public testing::TestWithParam<std::tuple<Maker, DType>> {
 protected:
  void SetUp() override {
    if (!make({.depth = 4, .columns = 4, .dtype = dtype()})) {
      GTEST_SKIP() << "built without oneDNN";
    }
    workspace_.reserve(1 << 20);
  }
  Maker maker() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  std::unique_ptr<DenseProduct> make(const ProductShape& shape) const {
    return place_.is_gpu() ? make_cublaslt_product(shape, place_.memory())
                           : make_on_host(maker(), shape);
  }

  /// Runs with the workspace poisoned; its peak must be what the product announces.
  void run(const Product& product, const TensorView& x, const TensorView& out) {
    workspace_.reserve(product.workspace_bytes(x.shape[0]));
    test::poison(workspace_);
    product.run(place_.context(*pool_, workspace_), x, out);
    EXPECT_EQ(workspace_.peak(), product.workspace_bytes(x.shape[0]));
  }

  /// oneDNN spins on OpenMP's team whatever pool it is given.
  std::unique_ptr<ThreadPool> pool_ = std::get<0>(GetParam()) == Maker::onednn
                                          ? make_openmp_thread_pool(2)
                                          : make_std_thread_pool(2);
  test::Place place_{std::get<0>(GetParam()) == Maker::cublaslt ? "gpu" : "host"};
  Workspace workspace_{place_.memory()};
};

/// Checks out [T, N, M] against float64 element by element: the rounding of the result, and of each
/// of K + 1 float32 additions at the size of the sum of magnitudes.
void expect_product(const TensorView& x, const TensorView& weight, const TensorView& bias,
                    const TensorView& out) {
  const std::int64_t tokens = x.shape[0], heads = x.shape[1], depth = x.shape[2],
                     columns = out.shape[2];
  for (std::int64_t n = 0; n < heads; ++n) {
    std::vector<double> rows = test::to_doubles(x.select(1, n));
    std::vector<double> matrix = test::to_doubles(weight.select(0, n).transpose(0, 1));
    std::vector<double> offset = bias ? test::to_doubles(bias) : std::vector<double>();
    const std::vector<double> expected = oracle::linear(rows, matrix, offset, depth);
    for (auto* values : {&rows, &matrix, &offset}) {
      for (double& value : *values) value = std::abs(value);
    }
    const std::vector<double> magnitudes = oracle::linear(rows, matrix, offset, depth);
    const std::vector<double> got = test::to_doubles(out.select(1, n));
    ASSERT_EQ(static_cast<std::int64_t>(got.size()), tokens * columns);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double allowed = test::unit_roundoff(out.dtype) * std::abs(expected[i]) +
                             0x1p-24 * static_cast<double>(depth + 1) * magnitudes[i] + 1e-7;
      ASSERT_LE(std::abs(got[i] - expected[i]), allowed)
          << "head " << n << " element " << i << " of [" << tokens << ", " << columns << "], depth "
          << depth << ": expected " << expected[i] << ", got " << got[i];
    }
  }
}

TEST_P(ProductTest, EveryRowCountOfATileAndBeyond) {
  const ProductShape shape{.depth = 37, .columns = 41, .dtype = dtype(), .has_bias = true};
  Tensor weight = Tensor::empty(dtype(), {1, shape.depth, shape.columns});
  Tensor bias = Tensor::empty(dtype(), {shape.columns});
  test::fill_normal(weight, 1);
  test::fill_normal(bias, 2);
  auto product = make(shape);
  product->load(weight, bias);
  for (std::int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 95, 96, 97, 200}) {
    PaddedTensor x(dtype(), {tokens, 1, shape.depth}), out(dtype(), {tokens, 1, shape.columns});
    test::fill_normal(x, 3);
    run(*product, x, out);
    expect_product(x, weight, bias, out);
    EXPECT_TRUE(out.padding_untouched()) << tokens;
  }
}

TEST_P(ProductTest, EveryWidthAndDepthAroundAVector) {
  for (std::int64_t columns : {1, 7, 8, 9, 15, 16, 17, 24, 33}) {
    for (std::int64_t depth : {1, 2, 3, 5, 8, 130}) {
      Tensor weight = Tensor::empty(dtype(), {1, depth, columns});
      test::fill_normal(weight, 1);
      auto product = make({.depth = depth, .columns = columns, .dtype = dtype()});
      product->load(weight, {});
      PaddedTensor x(dtype(), {3, 1, depth}), out(dtype(), {3, 1, columns});
      test::fill_normal(x, 2);
      run(*product, x, out);
      expect_product(x, weight, {}, out);
      EXPECT_TRUE(out.padding_untouched()) << columns << " columns, depth " << depth;
    }
  }
}

TEST_P(ProductTest, HeadsInStridedOperands) {
  // As in MLA: x is the front of [P + R] rows, out the front of [L + R] rows.
  for (std::int64_t heads : {1, 2, 5}) {
    for (std::int64_t tokens : {1, 3, 8, 40}) {
      constexpr std::int64_t kDepth = 24, kColumns = 40, kRope = 8;
      Tensor weight = Tensor::empty(dtype(), {heads, kDepth, kColumns});
      test::fill_normal(weight, 1);
      auto product =
          make({.heads = heads, .depth = kDepth, .columns = kColumns, .dtype = dtype()});
      product->load(weight, {});
      PaddedTensor x(dtype(), {tokens, heads, kDepth}, kRope);
      PaddedTensor out(dtype(), {tokens, heads, kColumns}, kRope);
      test::fill_normal(x, 2);
      run(*product, x, out);
      expect_product(x, weight, {}, out);
      EXPECT_TRUE(out.padding_untouched());
    }
  }
}

TEST_P(ProductTest, HeadMajorOperandsAndATransposedWeight) {
  constexpr std::int64_t kHeads = 3, kTokens = 5, kDepth = 16, kColumns = 20;
  Tensor weight = Tensor::empty(dtype(), {kHeads, kColumns, kDepth});
  Tensor x = Tensor::empty(dtype(), {kHeads, kTokens, kDepth});
  Tensor out = Tensor::empty(dtype(), {kHeads, kTokens, kColumns});
  test::fill_normal(weight, 1);
  test::fill_normal(x, 2);
  auto product =
      make({.heads = kHeads, .depth = kDepth, .columns = kColumns, .dtype = dtype()});
  product->load(weight.view().transpose(1, 2), {});
  run(*product, x.view().transpose(0, 1), out.view().transpose(0, 1));
  expect_product(x.view().transpose(0, 1), weight.view().transpose(1, 2), {},
                 out.view().transpose(0, 1));
}

TEST_P(ProductTest, RoundsOnceToNearestEvenAfterTheBias) {
  // 1 + u is a tie between 1 (even) and 1 + 2 u. A first rounding before the bias would lose it.
  if (dtype() == DType::f32) GTEST_SKIP() << "sums are rounded at every step";
  const double u = test::unit_roundoff(dtype());
  auto product = make({.depth = 2, .columns = 4, .dtype = dtype(), .has_bias = true});
  const std::vector<double> weights = {1, 1, 1, 1, u, 3 * u, u, u};  // [2, 4]
  const std::vector<double> biases = {0, 0, u * 0x1p-8, -u * 0x1p-8};
  product->load(test::tensor_from(dtype(), {1, 2, 4}, weights),
                test::tensor_from(dtype(), {4}, biases));
  const Tensor x = test::tensor_from(dtype(), {1, 1, 2}, std::vector<double>{1, 1});
  Tensor out = Tensor::empty(dtype(), {1, 1, 4});
  run(*product, x, out);
  EXPECT_EQ(test::to_doubles(out), (std::vector<double>{1, 1 + 4 * u, 1 + 2 * u, 1}));
}

TEST_P(ProductTest, NanAndInfinityStayInTheirRow) {
  constexpr std::int64_t kDepth = 19, kColumns = 18;
  Tensor weight = Tensor::empty(dtype(), {1, kDepth, kColumns});
  test::fill_uniform(weight, 1, 0.5, 1);
  auto product = make({.depth = kDepth, .columns = kColumns, .dtype = dtype()});
  product->load(weight, {});
  Tensor x = Tensor::empty(dtype(), {7, 1, kDepth}), out = Tensor::empty(dtype(), {7, 1, kColumns});
  test::fill_normal(x, 2);
  test::assign(x.view().select(1, 0).slice(0, 2, 3).slice(1, 4, 5), std::vector<double>{NAN});
  test::assign(x.view().select(1, 0).slice(0, 5, 6).slice(1, 4, 5),
               std::vector<double>{std::numeric_limits<double>::infinity()});
  run(*product, x, out);
  const std::vector<double> got = test::to_doubles(out);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t row = i / kColumns;
    EXPECT_EQ(std::isnan(got[i]), row == 2) << i;
    EXPECT_EQ(std::isinf(got[i]), row == 5) << i;
  }
}

TEST_P(ProductTest, LargeSumsOverflowToInfinityAsRoundingSays) {
  if (dtype() != DType::f16) GTEST_SKIP() << "sums of these are finite";
  auto product = make({.depth = 2, .columns = 2, .dtype = dtype()});
  product->load(test::tensor_from(dtype(), {1, 2, 2}, std::vector<double>{256, 256, 16, -256}), {});
  const Tensor x = test::tensor_from(dtype(), {1, 1, 2}, std::vector<double>{255, 256});
  Tensor out = Tensor::empty(dtype(), {1, 1, 2});
  run(*product, x, out);
  EXPECT_EQ(test::to_doubles(out),
            (std::vector<double>{std::numeric_limits<double>::infinity(), -256}));
}

TEST_P(ProductTest, ReloadKeepsTheStorage) {
  const ProductShape shape{.depth = 12, .columns = 20, .dtype = dtype(), .has_bias = true};
  Tensor weight = Tensor::empty(dtype(), {1, 12, 20}), bias = Tensor::empty(dtype(), {20});
  Tensor x = Tensor::empty(dtype(), {4, 1, 12}), out = Tensor::empty(dtype(), {4, 1, 20});
  test::fill_normal(x, 9);
  auto product = make(shape);
  for (std::uint64_t seed : {1, 2}) {
    test::fill_normal(weight, seed);
    test::fill_normal(bias, seed + 10);
    product->load(weight, bias);
    run(*product, x, out);
    expect_product(x, weight, bias, out);
  }
}

TEST_P(ProductTest, ThreadsDoNotChangeThePlainBits) {
  if (maker() >= Maker::onednn) GTEST_SKIP() << "others split sums as they like";
  constexpr std::int64_t kTokens = 110, kDepth = 200, kColumns = 130;
  Tensor weight = Tensor::empty(dtype(), {1, kDepth, kColumns});
  Tensor x = Tensor::empty(dtype(), {kTokens, 1, kDepth});
  test::fill_normal(weight, 1);
  test::fill_normal(x, 2);
  auto product = make({.depth = kDepth, .columns = kColumns, .dtype = dtype()});
  product->load(weight, {});
  Tensor one = Tensor::empty(dtype(), {kTokens, 1, kColumns});
  pool_ = make_std_thread_pool(1);
  run(*product, x, one);
  for (int threads : {2, 3}) {
    pool_ = make_std_thread_pool(threads);
    Tensor several = Tensor::empty(dtype(), {kTokens, 1, kColumns});
    run(*product, x, several);
    EXPECT_TRUE(test::bits_equal(one, several));
  }
}

TEST_P(ProductTest, PlainAllocatesNothing) {
  if (maker() >= Maker::onednn) GTEST_SKIP() << "other libraries allocate as they like";
  if (!FOVEA_COUNTS_MALLOC) GTEST_SKIP() << "a sanitizer owns malloc";
  Tensor weight = Tensor::zeros(dtype(), {2, 64, 96});
  Tensor x = Tensor::zeros(dtype(), {120, 2, 64}), out = Tensor::empty(dtype(), {120, 2, 96});
  auto product = make({.heads = 2, .depth = 64, .columns = 96, .dtype = dtype()});
  product->load(weight, {});
  pool_ = make_std_thread_pool(2);
  const ExecutionContext ctx{pool_.get(), &workspace_};
  product->run(ctx, x, out);
  EXPECT_EQ(test::count_mallocs([&] { product->run(ctx, x, out); }), 0);
}

std::string name_of_case(const testing::TestParamInfo<std::tuple<Maker, DType>>& instance) {
  const std::vector<std::string> makers = {"scalar", "best", "onednn", "cublaslt"};
  const auto& [maker, dtype] = instance.param;
  return makers[static_cast<std::size_t>(maker)] + "_" + std::string(name_of(dtype));
}

std::vector<Maker> available_makers() {
  std::vector<Maker> makers = {Maker::plain_scalar, Maker::plain_best, Maker::onednn};
  if (test::available_places().size() > 1) makers.push_back(Maker::cublaslt);
  return makers;
}

INSTANTIATE_TEST_SUITE_P(All, ProductTest,
                         testing::Combine(testing::ValuesIn(available_makers()),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)),
                         name_of_case);

}  // namespace
}  // namespace fovea
