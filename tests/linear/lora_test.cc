#include "linear/lora.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/oracle.h"
#include "fovea/thread_pool.h"
#include "linear/places.h"
#include "support/compare.h"
#include "support/poison.h"

namespace fovea {
namespace {

constexpr std::int64_t kIn = 37, kOut = 600;

/// Adapters of ranks 1, 5 and 20, each over other columns, and one without updates.
class LoraTest : public testing::TestWithParam<test::PlaceAndDType> {
 protected:
  DType dtype() const { return std::get<1>(GetParam()); }
  LoraTest() {
    add(0, "qkv", 1, 0, kOut, 2.f);
    add(1, "q", 5, 0, 290, 1.f);
    add(1, "v", 3, 580, 20, -0.5f);
    add(3, "k", 20, 290, 290, 1.f);
  }
  void add(std::size_t adapter, const char* name, std::int64_t rank, std::int64_t first,
           std::int64_t columns, float scale) {
    tensors_.push_back(Tensor::empty(dtype(), {rank, kIn}));
    test::fill_normal(tensors_.back(), tensors_.size(), 0.3);
    const TensorView a = tensors_.back();
    tensors_.push_back(Tensor::empty(DType::f32, {columns, rank}));
    test::fill_normal(tensors_.back(), tensors_.size(), 0.5);
    adapters_[adapter].push_back({name, {a, tensors_.back(), scale}, first, columns});
  }

  /// Row t after its adapter, in float64, from out's values before.
  void expect_row(const TensorView& x, int id, const std::vector<double>& before,
                  const TensorView& got) const {
    std::vector<double> expected = before, magnitude(before.size());
    const std::vector<double> row = test::to_doubles(x);
    const auto updates =
        id < 0 ? std::vector<LoraUpdate>() : adapters_[static_cast<std::size_t>(id)];
    for (const LoraUpdate& update : updates) {
      const std::vector<double> low =
          oracle::linear(row, test::to_doubles(update.weights.a), {}, kIn);
      const std::vector<double> delta = oracle::linear(low, test::to_doubles(update.weights.b), {},
                                                       static_cast<std::int64_t>(low.size()));
      for (std::size_t i = 0; i < delta.size(); ++i) {
        const auto column = static_cast<std::size_t>(update.first_column) + i;
        expected[column] += double{update.weights.scale} * delta[i];
        magnitude[column] += 50 * 0x1p-24 * (std::abs(delta[i]) + 10);
      }
    }
    const std::vector<double> values = test::to_doubles(got);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double allowed =
          updates.empty() ? 0
                          : test::unit_roundoff(dtype()) * std::abs(expected[i]) + magnitude[i];
      ASSERT_LE(std::abs(values[i] - expected[i]), allowed)
          << "column " << i << " of a row with adapter " << id << ": expected " << expected[i]
          << ", got " << values[i];
    }
  }

  test::Place place_{std::get<0>(GetParam())};
  std::vector<Tensor> tensors_;
  std::vector<std::vector<LoraUpdate>> adapters_{4};
};

TEST_P(LoraTest, EachRowGetsItsOwnAdapter) {
  const Lora lora(kIn, kOut, dtype(), adapters_, place_.memory());
  const auto pool = make_std_thread_pool(2);
  for (const std::int64_t tokens : {1, 2, 7, 60, 333}) {
    test::PaddedTensor x(dtype(), {tokens, kIn}), out(dtype(), {tokens, kOut});
    test::fill_normal(x, 1);
    test::fill_normal(out, 2);
    std::vector<double> ids;
    for (std::int64_t t = 0; t < tokens; ++t) {
      ids.push_back(
          static_cast<double>(test::random_below(3, static_cast<std::uint64_t>(t), 5) - 1));
    }
    // Rows without an adapter may hold anything, and keep it.
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (ids[static_cast<std::size_t>(t)] < 0) test::poison(x.view().select(0, t));
    }
    const std::vector<double> before = test::to_doubles(out);
    Workspace workspace(place_.memory());
    workspace.reserve(lora.workspace_bytes(tokens));
    test::poison(workspace);
    lora(place_.context(*pool, workspace), x, test::tensor_from(DType::i32, {tokens}, ids), out);
    EXPECT_EQ(workspace.peak(), lora.workspace_bytes(tokens));
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto row = static_cast<std::ptrdiff_t>(t * kOut);
      expect_row(x.view().select(0, t), static_cast<int>(ids[static_cast<std::size_t>(t)]),
                 {before.begin() + row, before.begin() + row + kOut}, out.view().select(0, t));
    }
    EXPECT_TRUE(out.padding_untouched());
  }
}

TEST_P(LoraTest, MorePassesThanOneGiveTheSameRows) {
  // Rows of x so wide that their f32 form is worked on in several passes. Sums of the last rows of
  // a pass run in another order.
  constexpr std::int64_t kWide = 40000, kTokens = 150;
  const Tensor a = Tensor::empty(dtype(), {2, kWide}), b = Tensor::empty(dtype(), {8, 2});
  test::fill_normal(a, 1, 0.01);
  test::fill_normal(b, 2);
  const std::vector<std::vector<LoraUpdate>> adapters = {{{"o", {a, b, 1.f}, 0, 8}}};
  const Lora lora(kWide, 8, dtype(), adapters, place_.memory());
  const Tensor x = Tensor::empty(dtype(), {kTokens, kWide});
  test::fill_uniform(x, 3, -1, 1);
  const auto pool = make_std_thread_pool(2);
  Workspace workspace(place_.memory());
  workspace.reserve(lora.workspace_bytes(kTokens));
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    Tensor out = Tensor::zeros(dtype(), {end - begin, 8});
    const Tensor ids = Tensor::zeros(DType::i32, {end - begin});
    lora(place_.context(*pool, workspace), x.view().slice(0, begin, end), ids, out);
    return out;
  };
  std::vector<double> parts = test::to_doubles(run(0, 48));
  for (double value : test::to_doubles(run(48, kTokens))) parts.push_back(value);
  // 40,000 additions of values around 1 round to some 1e-5.
  EXPECT_TRUE(
      test::rows_close(parts, run(0, kTokens), {4 * test::unit_roundoff(dtype()), 1e-4}));
}

TEST_P(LoraTest, ReloadTakesNewValuesOfTheSameShapes) {
  Lora lora(kIn, kOut, dtype(), adapters_, place_.memory());
  for (auto& adapter : adapters_) {
    for (LoraUpdate& update : adapter) update.weights.scale *= 3;
  }
  lora.reload(adapters_);
  const Lora made(kIn, kOut, dtype(), adapters_, place_.memory());
  const auto pool = make_std_thread_pool(1);
  Workspace workspace(place_.memory());
  workspace.reserve(lora.workspace_bytes(3));
  const Tensor x = Tensor::empty(dtype(), {3, kIn});
  test::fill_normal(x, 1);
  const Tensor ids = test::tensor_from(DType::i32, {3}, std::vector<double>{3, 0, 1});
  const auto run = [&](const Lora& which) {
    const Tensor out = Tensor::zeros(dtype(), {3, kOut});
    which(place_.context(*pool, workspace), x, ids, out);
    return test::to_doubles(out);
  };
  EXPECT_EQ(run(lora), run(made));
  adapters_[1].pop_back();
  try {
    lora.reload(adapters_);
    FAIL() << "an adapter has one update less";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("lora[1]"), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(, LoraTest,
                         testing::Combine(testing::ValuesIn(test::available_places()),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)),
                         test::place_case_name);

}  // namespace
}  // namespace fovea
