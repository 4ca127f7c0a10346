// Logits that break a softmax which is not careful: for decode and prefill alike.
#include <functional>

#include "ops/mla_problem.h"
#include "ops/prefill_problem.h"

namespace fovea::test {
namespace {

class ExtremeValues : public BackendTest {
 protected:
  /// One query token over 200 keys whose logits are logit(j), through the first channel alone; the
  /// other channels carry the values.
  void check_decode(const std::function<double(std::int64_t)>& logit) {
    MlaShape shape;
    shape.heads = 3;
    shape.seq_lens = {200};
    MlaProblem problem(shape, dtype());
    const double scale = problem.params().sm_scale;
    assign(problem.q_pe(), std::vector<double>(3 * 8, 0.0));
    std::vector<double> q(3 * 32, 0.0);
    for (std::size_t n = 0; n < 3; ++n) q[n * 32] = 1 / scale;
    assign(problem.q_latent(), q);
    for (std::int64_t j = 0; j < 200; ++j) {
      store_element(dtype(), static_cast<std::byte*>(problem.key_row(0, j).data), logit(j));
    }
    for (std::int32_t workers : {1, 4}) {
      SCOPED_TRACE(::testing::Message() << "decode, workers " << workers);
      problem.run(ctx(), workers);
      problem.check();
    }
  }

  void check_prefill(const std::function<double(std::int64_t)>& logit) {
    SCOPED_TRACE("prefill");
    PrefillShape shape;
    shape.rope = 0;
    shape.query_lens = {70};
    shape.seq_lens = {200};
    PrefillProblem problem(shape, dtype());
    std::vector<double> q(70 * 4 * 16, 0.0);
    for (std::size_t row = 0; row < 70 * 4; ++row) q[row * 16] = 4;
    assign(problem.q(), q);
    for (std::int64_t j = 0; j < 200; ++j) {
      for (std::int64_t h = 0; h < 4; ++h) {
        const TensorView row = problem.k().select(0, j).select(0, h);
        store_element(dtype(), static_cast<std::byte*>(row.data), logit(j));
      }
    }
    problem.run(ctx());
    problem.check();
  }

  void check(const std::function<double(std::int64_t)>& logit) {
    check_decode(logit);
    check_prefill(logit);
  }
};
FOVEA_FOR_EACH_BACKEND(ExtremeValues);

TEST_P(ExtremeValues, LogitsThatFallByMoreThanExpCanHold) {
  // exp(-88) is the smallest normal float32: later tiles vanish next to the first.
  check([](std::int64_t j) { return -4.0 * static_cast<double>(j); });
}

TEST_P(ExtremeValues, LogitsThatRiseByMoreThanExpCanHold) {
  // Every tile rescales what came before by nothing.
  check([](std::int64_t j) { return 4.0 * static_cast<double>(j); });
}

TEST_P(ExtremeValues, VeryLargeLogits) {
  check([](std::int64_t j) { return j == 130 ? 30000.0 : 29000.0 + 64.0 * (j % 3); });
}

TEST_P(ExtremeValues, VeryNegativeLogits) {  // B047: a zero for a masked key would dominate.
  check([](std::int64_t) { return -10.0; });
  check([](std::int64_t j) { return -30000.0 + 64.0 * (j % 5); });
}

TEST_P(ExtremeValues, UniformLogits) {
  check([](std::int64_t) { return 0.0; });
}

TEST_P(ExtremeValues, ANaNInAQueryStaysInItsRow) {
  MlaShape shape;
  shape.heads = 3;
  shape.query_lens = {1, 2};
  shape.seq_lens = {100, 90};
  MlaProblem problem(shape, dtype());
  problem.run(ctx(), 3);
  const Tensor clean = Tensor::empty(dtype(), {3, 3, 32});
  copy(problem.out(), clean);
  poison(problem.q_pe().select(0, 1).select(0, 2));
  problem.run(ctx(), 3);
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t n = 0; n < 3; ++n) {
      const TensorView got = problem.out().select(0, t).select(0, n);
      if (t == 1 && n == 2) {
        EXPECT_TRUE(all_nan(got));
        EXPECT_TRUE(std::isnan(*problem.lse().ptr<float>({n, t})));
      } else {
        EXPECT_TRUE(bits_equal(clean.view().select(0, t).select(0, n), got));
      }
    }
  }
}

TEST_P(ExtremeValues, ANaNInAVisibleKeyComesThrough) {
  MlaShape shape;
  shape.seq_lens = {100};
  for (std::int64_t key : {0, 50, 99}) {
    MlaProblem problem(shape, dtype());
    poison(problem.key_row(0, key));
    problem.run(ctx(), 2);
    EXPECT_TRUE(all_nan(problem.out())) << "key " << key;
  }
}

TEST_P(ExtremeValues, LaterKeysOfADraftAreNotRead) {
  // Token i of 4 may not see the keys of tokens behind it, even when they are NaN.
  MlaShape shape;
  shape.query_lens = {4};
  shape.seq_lens = {60};
  MlaProblem problem(shape, dtype());
  problem.run(ctx());
  const Tensor clean = Tensor::empty(dtype(), {4, 4, 32});
  copy(problem.out(), clean);
  poison(problem.key_row(0, 58));
  problem.run(ctx());
  EXPECT_TRUE(bits_equal(clean.view().slice(0, 0, 2), problem.out().slice(0, 0, 2)));
  EXPECT_TRUE(all_nan(problem.out().slice(0, 2, 4)));
}

}  // namespace
}  // namespace fovea::test
