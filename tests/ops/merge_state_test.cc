// Merging partial attention states.
#include <optional>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "ops/backend_test.h"

namespace fovea::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class MergeState : public BackendTest {
 protected:
  struct State {
    State(DType dtype, std::int64_t tokens, std::int64_t heads, std::int64_t width, int gap)
        : out(dtype, {tokens, heads, width}, gap), lse(DType::f32, {heads, tokens}, gap) {}
    AttentionState view() const { return {out.view(), lse.view()}; }
    PaddedTensor out, lse;
  };

  State random_state(std::uint64_t seed, std::int64_t tokens, std::int64_t heads,
                     std::int64_t width, int gap, std::optional<DType> other = {}) const {
    State state(other.value_or(dtype()), tokens, heads, width, gap);
    fill_normal(state.out, seed);
    fill_normal(state.lse, seed + 1, 4);
    return state;
  }

  static oracle::AttentionResult doubles(const AttentionState& state) {
    return {to_doubles(state.out), to_doubles(state.lse)};
  }

  static oracle::AttentionResult expected(const AttentionState& a, const AttentionState& b) {
    return oracle::merge(doubles(a), doubles(b), a.out.shape[1], a.out.shape[0], a.out.shape[2]);
  }

  void expect_merged(const oracle::AttentionResult& expected, const AttentionState& got) const {
    // Terms of either sign and size 1 may cancel.
    const double roundoff = unit_roundoff(got.out.dtype);
    EXPECT_TRUE(rows_close(expected.out, got.out, {8 * roundoff, 4 * roundoff}));
    EXPECT_TRUE(values_close(expected.lse, got.lse, 2e-6, 1e-6));
  }
};
FOVEA_FOR_EACH_BACKEND(MergeState);

TEST_P(MergeState, MatchesFloat64ForAnyStrides) {  // F127
  std::uint64_t seed = 0;
  for (std::int64_t width : {1, 16, 64, 100, 512}) {
    for (std::int64_t heads : {1, 3, 16}) {
      SCOPED_TRACE(::testing::Message() << heads << " heads, width " << width);
      // Every view has its own gaps, so that no stride can stand for another.
      const State prefix = random_state(++seed, 7, heads, width, 0);
      const State suffix = random_state(++seed, 7, heads, width, 5);
      const State result(dtype(), 7, heads, width, 11);
      merge_state(ctx(), {prefix.view(), suffix.view(), result.view(), {}});
      expect_merged(expected(prefix.view(), suffix.view()), result.view());
      EXPECT_TRUE(result.out.padding_untouched());
      EXPECT_TRUE(result.lse.padding_untouched());
    }
  }
}

TEST_P(MergeState, TransposedStatesAreMerged) {
  const State prefix = random_state(1, 5, 3, 16, 0);
  const Tensor head_major = Tensor::empty(dtype(), {3, 5, 16});
  const Tensor token_major_lse = Tensor::empty(DType::f32, {5, 3});
  const AttentionState suffix{head_major.view().transpose(0, 1),
                              token_major_lse.view().transpose(0, 1)};
  fill_normal(suffix.out, 5);
  fill_normal(suffix.lse, 6);
  const Tensor scattered = Tensor::empty(dtype(), {16, 5, 3});
  const Tensor lse = Tensor::empty(DType::f32, {3, 5});
  const AttentionState result{scattered.view().transpose(0, 1).transpose(1, 2), lse};
  merge_state(ctx(), {prefix.view(), suffix, result, {}});
  expect_merged(expected(prefix.view(), suffix), result);
}

TEST_P(MergeState, TheResultMayBeEitherInput) {  // F335
  for (bool into_prefix : {true, false}) {
    SCOPED_TRACE(into_prefix);
    const State prefix = random_state(1, 9, 4, 24, 3);
    const State suffix = random_state(3, 9, 4, 24, 4);
    prefix.lse.view().ptr<float>()[2] = -kInfinity;
    suffix.lse.view().ptr<float>()[5] = -kInfinity;
    const oracle::AttentionResult merged = expected(prefix.view(), suffix.view());
    const State& target = into_prefix ? prefix : suffix;
    merge_state(ctx(), {prefix.view(), suffix.view(), target.view(), {}});
    expect_merged(merged, target.view());
    EXPECT_TRUE(target.out.padding_untouched());
  }
}

TEST_P(MergeState, TheResultsLseIsOptional) {  // F129
  const State prefix = random_state(1, 4, 2, 16, 0);
  const State suffix = random_state(3, 4, 2, 16, 0);
  const State result(dtype(), 4, 2, 16, 0);
  merge_state(ctx(), {prefix.view(), suffix.view(), {result.out.view(), {}}, {}});
  EXPECT_TRUE(rows_close(expected(prefix.view(), suffix.view()).out, result.out,
                         row_tolerance(dtype(), 8)));
  EXPECT_TRUE(std::isnan(*result.lse.view().ptr<float>()));
}

TEST_P(MergeState, TwoEmptyStatesMakeAnEmptyOne) {  // F128, F340, B001
  for (float a : {-kInfinity, kInfinity}) {
    for (float b : {-kInfinity, kInfinity}) {
      const State prefix(dtype(), 2, 3, 16, 2), suffix(dtype(), 2, 3, 16, 2);
      const State result(dtype(), 2, 3, 16, 2);
      // What an empty state's rows hold is nobody's business: here NaN.
      for (std::int64_t n = 0; n < 3; ++n) {
        for (std::int64_t t = 0; t < 2; ++t) {
          *prefix.lse.view().ptr<float>({n, t}) = a;
          *suffix.lse.view().ptr<float>({n, t}) = b;
        }
      }
      merge_state(ctx(), {prefix.view(), suffix.view(), result.view(), {}});
      EXPECT_TRUE(all_zero(result.out));
      for (double x : to_doubles(result.lse)) EXPECT_EQ(x, -kInfinity);
    }
  }
}

TEST_P(MergeState, AnEmptyStateLeavesTheOtherBitForBit) {  // B002, B003, B013
  for (float empty : {-kInfinity, kInfinity}) {
    for (bool prefix_is_empty : {true, false}) {
      const State full = random_state(1, 6, 3, 37, 4);
      const State none(dtype(), 6, 3, 37, 2);
      const State result(dtype(), 6, 3, 37, 3);
      for (std::int64_t n = 0; n < 3; ++n) {
        for (std::int64_t t = 0; t < 6; ++t) *none.lse.view().ptr<float>({n, t}) = empty;
      }
      *full.lse.view().ptr<float>({1, 1}) = -1e30f;  // Finite, however small.
      const auto [prefix, suffix] = prefix_is_empty ? std::pair(none.view(), full.view())
                                                    : std::pair(full.view(), none.view());
      merge_state(ctx(), {prefix, suffix, result.view(), {}});
      EXPECT_TRUE(bits_equal(full.out, result.out));
      EXPECT_TRUE(bits_equal(full.lse, result.lse));
    }
  }
}

TEST_P(MergeState, EmptyRowsAmongOthersDoNotDisturbThem) {  // B003
  const State prefix = random_state(1, 64, 8, 64, 0);
  const State suffix = random_state(3, 64, 8, 64, 0);
  const State result(dtype(), 64, 8, 64, 0), clean(dtype(), 64, 8, 64, 0);
  merge_state(ctx(), {prefix.view(), suffix.view(), clean.view(), {}});
  std::vector<bool> is_empty(64 * 8, false);
  for (std::size_t row = 0; row < is_empty.size(); ++row) {
    const auto t = static_cast<std::int64_t>(row) / 8, n = static_cast<std::int64_t>(row) % 8;
    const std::int64_t kind = random_below(7, row, 20);
    if (kind > 6) continue;
    is_empty[row] = true;
    const float empty = kind > 4 ? kInfinity : -kInfinity;
    *prefix.lse.view().ptr<float>({n, t}) = *suffix.lse.view().ptr<float>({n, t}) = empty;
  }
  merge_state(ctx(), {prefix.view(), suffix.view(), result.view(), {}});
  for (std::size_t row = 0; row < is_empty.size(); ++row) {
    const auto t = static_cast<std::int64_t>(row) / 8, n = static_cast<std::int64_t>(row) % 8;
    const TensorView got = result.out.view().select(0, t).select(0, n);
    if (is_empty[row]) {
      EXPECT_TRUE(all_zero(got));
    } else {
      EXPECT_TRUE(bits_equal(clean.out.view().select(0, t).select(0, n), got));
    }
  }
}

TEST_P(MergeState, WeightsAreOfTheNaturalLogarithm) {  // F341, B015
  // Uniform logits over 3072 and 64 keys: the shorter part weighs 64 / 3136.
  const State prefix(dtype(), 1, 1, 8, 0), suffix(dtype(), 1, 1, 8, 0),
      result(DType::f32, 1, 1, 8, 0);
  assign(prefix.out, std::vector<double>(8, 0.0));
  assign(suffix.out, std::vector<double>(8, 1.0));
  *prefix.lse.view().ptr<float>() = std::log(3072.f);
  *suffix.lse.view().ptr<float>() = std::log(64.f);
  merge_state(ctx(), {prefix.view(), suffix.view(), result.view(), {}});
  EXPECT_TRUE(values_close(std::vector<double>(8, 64.0 / 3136.0), result.out, 1e-6));
  EXPECT_TRUE(values_close(std::vector<double>{std::log(3136.0)}, result.lse, 1e-6));
}

TEST_P(MergeState, FarApartStatesNeitherOverflowNorVanish) {
  const State prefix = random_state(1, 1, 6, 16, 0), suffix = random_state(3, 1, 6, 16, 0);
  const State result(dtype(), 1, 6, 16, 0);
  const float prefix_lse[] = {30000.f, -30000.f, 500.f, 1e30f, -1e30f, 80.f};
  const float suffix_lse[] = {-30000.f, -29999.f, 400.f, 1e30f, 1e30f, -80.f};
  for (std::int64_t n = 0; n < 6; ++n) {
    *prefix.lse.view().ptr<float>({n, 0}) = prefix_lse[n];
    *suffix.lse.view().ptr<float>({n, 0}) = suffix_lse[n];
  }
  merge_state(ctx(), {prefix.view(), suffix.view(), result.view(), {}});
  expect_merged(expected(prefix.view(), suffix.view()), result.view());
}

TEST_P(MergeState, ANaNPartMakesItsRowNaN) {
  const State prefix = random_state(1, 3, 2, 16, 0), suffix = random_state(3, 3, 2, 16, 0);
  const State result(dtype(), 3, 2, 16, 0);
  *suffix.lse.view().ptr<float>({1, 2}) = std::numeric_limits<float>::quiet_NaN();
  merge_state(ctx(), {prefix.view(), suffix.view(), result.view(), {}});
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t n = 0; n < 2; ++n) {
      const bool expect_nan = t == 2 && n == 1;
      for (double x : to_doubles(result.out.view().select(0, t).select(0, n))) {
        EXPECT_EQ(std::isnan(x), expect_nan);
      }
      EXPECT_EQ(std::isnan(*result.lse.view().ptr<float>({n, t})), expect_nan);
    }
  }
}

TEST_P(MergeState, ASinkJoinsTheDenominatorAndNotTheLse) {  // F245
  const State prefix = random_state(1, 7, 5, 40, 2), suffix = random_state(3, 7, 5, 40, 4);
  // Empty on one side, on the other, on both: a sink never brings a row to life.
  *prefix.lse.view().ptr<float>({0, 1}) = -kInfinity;
  *suffix.lse.view().ptr<float>({1, 2}) = kInfinity;
  *prefix.lse.view().ptr<float>({2, 3}) = *suffix.lse.view().ptr<float>({2, 3}) = -kInfinity;
  const Tensor strided = Tensor::empty(DType::f32, {5, 2});
  const TensorView sinks = strided.view().select(1, 1);
  assign(sinks, std::vector<double>{2, -1, 0.5, -kInfinity, 90});
  oracle::AttentionResult a = doubles(prefix.view()), b = doubles(suffix.view());
  b.lse[1 * 7 + 2] = -kInfinity;
  const std::vector<double> sink_values = to_doubles(sinks);
  const oracle::AttentionResult merged = oracle::merge(a, b, 5, 7, 40, sink_values);
  for (bool in_place : {false, true}) {
    const State result(dtype(), 7, 5, 40, 3);
    const AttentionState target = in_place ? suffix.view() : result.view();
    merge_state(ctx(), {prefix.view(), suffix.view(), target, sinks});
    const double roundoff = unit_roundoff(dtype());
    EXPECT_TRUE(rows_close(merged.out, target.out, {8 * roundoff, 4 * roundoff}));
    EXPECT_TRUE(values_close(merged.lse, target.lse, 2e-6, 1e-6));
    EXPECT_TRUE(all_zero(target.out.select(0, 3).select(0, 2)));
  }
}

TEST_P(MergeState, ASinkOfMinusInfinityIsNone) {
  const State prefix = random_state(1, 6, 3, 37, 4), suffix = random_state(3, 6, 3, 37, 1);
  const State with(dtype(), 6, 3, 37, 3), without(dtype(), 6, 3, 37, 3);
  const Tensor sinks = Tensor::empty(DType::f32, {3});
  assign(sinks, std::vector<double>(3, -kInfinity));
  merge_state(ctx(), {prefix.view(), suffix.view(), with.view(), sinks});
  merge_state(ctx(), {prefix.view(), suffix.view(), without.view(), {}});
  EXPECT_TRUE(bits_equal(without.out, with.out));
  EXPECT_TRUE(bits_equal(without.lse, with.lse));
}

TEST_P(MergeState, EachStateHasItsOwnDType) {
  for (DType prefix_dtype : {DType::f32, DType::f16, DType::bf16}) {
    const State prefix = random_state(1, 5, 3, 40, 1, prefix_dtype);
    const State suffix = random_state(3, 5, 3, 40, 2);
    const State result(dtype(), 5, 3, 40, 3);
    *prefix.lse.view().ptr<float>({0, 0}) = -kInfinity;
    *suffix.lse.view().ptr<float>({1, 1}) = -kInfinity;
    merge_state(ctx(), {prefix.view(), suffix.view(), result.view(), {}});
    expect_merged(expected(prefix.view(), suffix.view()), result.view());
  }
}

}  // namespace
}  // namespace fovea::test
