// What the partition code promises: bits that do not depend on which thread does what when.
#include <algorithm>

#include "backend_cpu/cpu_test.h"
#include "ops/mla_problem.h"
#include "ops/prefill_problem.h"

namespace fovea::test {
namespace {

/// One thread that claims to be several and takes tasks from the last to the first.
class ReversedPool final : public ThreadPool {
 public:
  explicit ReversedPool(int num_threads) : num_threads_(num_threads) {}
  int num_threads() const override { return num_threads_; }
  void run(std::int64_t num_tasks, TaskRef fn) override {
    for (std::int64_t task = num_tasks - 1; task >= 0; --task) fn(task);
  }

 private:
  int num_threads_;
};

class ScheduleIndependence : public IsaTest {
 protected:
  RuntimeOptions options(ThreadPool* pool, int num_threads) const {
    RuntimeOptions options;
    options.backend = "cpu";
    options.isa = name_of(GetParam());
    options.pool = pool;
    options.num_threads = num_threads;
    return options;
  }
  ReversedPool reversed_{5};
};
FOVEA_FOR_EACH_ISA(ScheduleIndependence);

TEST_P(ScheduleIndependence, CombinedPartialsHaveTheSameBitsWhoeverComesLast) {
  MlaShape shape;
  shape.heads = 6;
  shape.query_lens = {1, 2, 1};
  shape.seq_lens = {700, 40, 333};
  MlaProblem problem(shape, DType::f32);
  Runtime one(options(nullptr, 1)), two(options(nullptr, 2)), reversed(options(&reversed_, 0));
  problem.run(one, 5);
  problem.check();
  const Tensor expected = Tensor::empty(DType::f32, {4, shape.heads, shape.latent});
  copy(problem.out(), expected);
  problem.run(reversed, 5);
  EXPECT_TRUE(bits_equal(expected, problem.out()));
  for (int i = 0; i < 20; ++i) {
    problem.run(two, 5);
    EXPECT_TRUE(bits_equal(expected, problem.out()));
  }
}

TEST_P(ScheduleIndependence, PrefillTasksMayRunOnAnyThread) {
  PrefillShape shape;
  shape.query_lens = {70, 3};
  shape.seq_lens = {90, 3};
  PrefillProblem problem(shape, DType::bf16);
  Runtime one(options(nullptr, 1)), reversed(options(&reversed_, 0));
  problem.run(one);
  const Tensor expected =
      Tensor::empty(DType::bf16, {73, problem.out().shape[1], problem.out().shape[2]});
  copy(problem.out(), expected);
  problem.run(reversed);
  EXPECT_TRUE(bits_equal(expected, problem.out()));
}

TEST_P(ScheduleIndependence, MoreRowsThanScratchHoldsGoInSeveralPasses) {
  // 12 heads x 100 tokens: the border of a pass lies within a token's heads.
  MlaShape shape;
  shape.heads = 12;
  shape.latent = 16;
  shape.rope = 4;
  shape.query_lens = {100, 1};
  shape.seq_lens = {130, 77};
  MlaProblem problem(shape, DType::f32);
  Runtime runtime(options(nullptr, 2));
  for (std::int32_t workers : {1, 3}) {
    problem.run(runtime, workers);
    problem.check();
  }
}

}  // namespace
}  // namespace fovea::test
