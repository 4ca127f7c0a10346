// Given a plan and a workspace, an op allocates nothing: counted where every allocation ends, in
// malloc. Its own program, because it replaces malloc.
#include <gtest/gtest.h>

#include "ops/gqa_problem.h"
#include "ops/mla_problem.h"
#include "ops/prefill_problem.h"
#include "support/malloc_counter.h"

namespace fovea::test {
namespace {

template <class Call>
std::int64_t allocations_of(Call&& call) {
  call();  // The first launch of a kernel on a device may set it up.
  return count_mallocs(call);
}

class Allocation : public BackendTest {
 protected:
  void SetUp() override {
    if (!FOVEA_COUNTS_MALLOC) GTEST_SKIP() << "malloc is the sanitizer's here";
  }
};
FOVEA_FOR_EACH_BACKEND(Allocation);

TEST_P(Allocation, TheCounterSeesNewAndMalloc) {
  EXPECT_GE(allocations_of([] { std::vector<int> heap(100); }), 1);
  EXPECT_GE(allocations_of([] { Tensor::empty(DType::f32, {100}); }), 1);
  EXPECT_EQ(allocations_of([] {}), 0);
}

TEST_P(Allocation, MlaDecodeAllocatesNothing) {
  MlaShape shape;
  shape.query_lens = {1, 2, 1};
  shape.seq_lens = {300, 40, 0};
  shape.padding_rows = 2;
  const MlaProblem problem(shape, dtype());
  MlaDecodeParams params = problem.params();
  const DecodeSchedule schedule =
      schedule_decode(problem.query_start_loc(), shape.seq_lens, ctx().plan_target);
  params.schedule = &schedule;
  ctx().workspace->reserve(workspace_bytes(ctx(), params));
  EXPECT_EQ(allocations_of([&] { mla_decode(ctx(), params); }), 0);
  problem.check();
}

TEST_P(Allocation, AttentionPrefillAllocatesNothing) {
  PrefillShape shape;
  shape.query_lens = {40, 3};
  shape.seq_lens = {40, 90};
  const PrefillProblem problem(shape, dtype());
  AttentionPrefillParams params = problem.params();
  const PrefillSchedule schedule = schedule_prefill(problem.cu_q(), problem.cu_k(), 16);
  params.schedule = &schedule;
  ctx().workspace->reserve(workspace_bytes(ctx(), params));
  EXPECT_EQ(allocations_of([&] { attention_prefill(ctx(), params); }), 0);
  problem.check();
}

TEST_P(Allocation, AttentionOverBlocksAllocatesNothing) {
  GqaShape shape;
  shape.query_lens = {2, 4, 0};
  shape.seq_lens = {300, 40, 9};
  shape.padding_rows = 2;
  shape.sinks = true;
  shape.variant.window_left = 100;
  shape.draft_tree = {1, 2, 1, 3, 5, 9};
  const GqaProblem problem(shape, dtype());
  AttentionDecodeParams decode = problem.decode_params();
  const DecodeSchedule schedule = problem.decode_schedule(ctx(), 3, 16);
  decode.schedule = &schedule;
  ctx().workspace->reserve(workspace_bytes(ctx(), decode));
  EXPECT_EQ(allocations_of([&] { attention_decode(ctx(), decode); }), 0);
  problem.check();

  shape.draft_tree.clear();
  const GqaProblem plain(shape, dtype());
  AttentionPrefillParams prefill = plain.paged_prefill_params();
  const PrefillSchedule tiles =
      schedule_prefill(plain.query_start_loc(), plain.cu_k(), 16, shape.variant);
  prefill.schedule = &tiles;
  ctx().workspace->reserve(workspace_bytes(ctx(), prefill));
  EXPECT_EQ(allocations_of([&] { attention_prefill(ctx(), prefill); }), 0);
  plain.check();
}

TEST_P(Allocation, OpsOnRowsAllocateNothing) {
  const Tensor x = Tensor::zeros(dtype(), {8, 64}), weight = Tensor::zeros(dtype(), {64});
  EXPECT_EQ(allocations_of([&] { rms_norm(ctx(), {x, weight, x}); }), 0);

  const Tensor q = Tensor::zeros(dtype(), {8, 4, 64}), table = Tensor::zeros(DType::f32, {9, 64});
  const Tensor index = Tensor::zeros(DType::i64, {1, 8});
  EXPECT_EQ(allocations_of([&] {
              rope(ctx(), {q, {index, table, RopePairing::interleaved, {}}});
            }),
            0);

  const Tensor lse = Tensor::zeros(DType::f32, {4, 8}), out = Tensor::zeros(dtype(), {8, 4, 64});
  const Tensor sinks = Tensor::zeros(DType::f32, {4});
  const MergeStateParams merge{{q, lse}, {q, lse}, {out, lse}, sinks};
  EXPECT_EQ(allocations_of([&] { merge_state(ctx(), merge); }), 0);

  const PagedKvCache cache =
      PagedKvCache::allocate({dtype(), 64}, {.num_blocks = 2, .block_size = 4});
  const std::vector<std::int64_t> slots{0, 1, 2, 3, 4, 5, 6, -1};
  const std::vector<std::int32_t> blocks{1, 0}, starts{0}, lens{8};
  const KvAppendParams append{x.view().slice(1, 0, 48), x.view().slice(1, 48, 64),
                              TensorView::of(slots.data(), {8}), &cache};
  EXPECT_EQ(allocations_of([&] { kv_append(ctx(), append); }), 0);
  const PagedKvCache v_cache =
      PagedKvCache::allocate({dtype(), 64}, {.num_blocks = 2, .block_size = 4});
  const Tensor angles = Tensor::zeros(DType::f32, {9, 16});
  const TensorView heads = x.view().split(1, 2, 32);
  const GqaAppendParams gqa{heads,  heads,    TensorView::of(slots.data(), {8}),
                            &cache, &v_cache, {index, angles, RopePairing::neox, {}}};
  EXPECT_EQ(allocations_of([&] { gqa_append(ctx(), gqa); }), 0);
  const KvGatherParams gather{&cache, {blocks.data(), 1, 2, 2}, starts, lens, x};
  EXPECT_EQ(allocations_of([&] { kv_gather(ctx(), gather); }), 0);
}

}  // namespace
}  // namespace fovea::test
