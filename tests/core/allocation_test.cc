// What runs inside a step must not allocate.
#include <gtest/gtest.h>

#include <memory>

#include "fovea/tensor.h"
#include "fovea/thread_pool.h"
#include "fovea/workspace.h"
#include "support/malloc_counter.h"

namespace fovea {
namespace {

TEST(AllocationTest, PoolRunsWorkspaceScopesAndCopiesAllocateNothing) {
  if (!FOVEA_COUNTS_MALLOC) GTEST_SKIP() << "a sanitizer owns malloc";
  const auto pool = make_std_thread_pool(3);
  Workspace workspace;
  workspace.reserve(1 << 16);
  const Tensor src = Tensor::zeros(DType::f32, {6, 7, 8});
  const Tensor dst = Tensor::zeros(DType::bf16, {8, 7, 6});
  std::int64_t sum = 0;
  const std::int64_t calls = test::count_mallocs([&] {
    for (int round = 0; round < 20; ++round) {
      WorkspaceScope scope(workspace);
      auto* partial = scope.take<std::int64_t>(100);
      pool->run(100, [&](std::int64_t task) { partial[task] = task; });
      for (int i = 0; i < 100; ++i) sum += partial[i];
      copy(src.view().transpose(0, 2), dst);
      copy(src.view().slice(0, 1, 3).fuse(0), scope.take(DType::f32, {14, 8}));
    }
  });
  EXPECT_EQ(sum, 20 * 4950);
  EXPECT_EQ(calls, 0);
  // The counter counts.
  EXPECT_GT(test::count_mallocs([] { Tensor::zeros(DType::f32, {1000}); }), 0);
}

}  // namespace
}  // namespace fovea
