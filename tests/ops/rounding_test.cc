// How far bf16 attention may be from the formulas, element by element: docs/semantics.md, Rounding.
#include "ops/backend_test.h"
#include "ops/gqa_problem.h"
#include "ops/mla_problem.h"

namespace fovea::test {
namespace {

class Rounding : public BackendTest {
 protected:
  /// Two units in the last place of the output, and of the values' mean magnitude the rounding of
  /// weights and the sums' in f32.
  template <class Problem>
  void check(const Problem& problem, const TensorView& out) {
    const std::vector<double> expected = problem.expected().out;
    const std::vector<double> magnitudes = problem.expected_magnitudes().out;
    const std::vector<double> got = to_doubles(out);
    ASSERT_EQ(expected.size(), got.size());
    double worst = 0;
    std::size_t at = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double unit = std::exp2(std::floor(std::log2(std::abs(expected[i]) + 1e-30)) - 7);
      const double allowed = 2 * unit + (weight_rounding() + 0x1p-14) * magnitudes[i];
      const double used = std::abs(expected[i] - got[i]) / allowed;
      if (!(used <= worst)) worst = used, at = i;
    }
    EXPECT_LE(worst, 1) << "element " << at << ": expected " << expected[at] << ", got " << got[at]
                        << ", values' mean magnitude " << magnitudes[at];
  }
};
INSTANTIATE_TEST_SUITE_P(, Rounding,
                         ::testing::Combine(::testing::ValuesIn(available_backends()),
                                            ::testing::Values(DType::bf16)),
                         backend_case_name);

TEST_P(Rounding, LatentDecode) {
  for (std::int64_t heads : {2, 16, 20}) {
    for (double stddev : {0.1, 3.0}) {
      MlaShape shape;
      shape.heads = heads;
      shape.latent = 96;
      shape.rope = 16;
      shape.seq_lens = {700};
      shape.logit_stddev = stddev;
      MlaProblem problem(shape, dtype());
      problem.run(ctx(), 2);
      check(problem, problem.out());
    }
  }
}

TEST_P(Rounding, GroupedQueries) {
  for (AttentionPath path : kAttentionPaths) {
    for (double stddev : {0.1, 3.0}) {
      GqaShape shape;
      shape.heads = 8;
      shape.query_lens = {3};
      shape.seq_lens = {500};
      shape.logit_stddev = stddev;
      GqaProblem problem(shape, dtype());
      problem.run(ctx(), path);
      check(problem, problem.out());
    }
  }
}

}  // namespace
}  // namespace fovea::test
