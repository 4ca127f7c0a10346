// Indices in device memory that are out of range are reported, and what they point to is not
// touched.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "fovea/error.h"
#include "fovea/ops.h"
#include "fovea/runtime.h"
#include "support/compare.h"

namespace fovea::test {
namespace {

class IndexChecks : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    try {
      runtime_ = std::make_unique<Runtime>(RuntimeOptions{.backend = "cuda",
                                                          .isa = GetParam(),
                                                          .num_threads = 1,
                                                          .own_cuda_stream = true,
                                                          .check_device_indices = true});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
      GTEST_SKIP() << error.what();
    }
  }
  const OpContext& ctx() const { return *runtime_; }
  /// What the next call finds, and then nothing any more.
  std::string fault() const {
    const std::string found = runtime_->take_device_fault();
    EXPECT_EQ(runtime_->take_device_fault(), "");
    return found;
  }
  Tensor shared(DType dtype, std::initializer_list<std::int64_t> shape) const {
    return Tensor::empty(dtype, shape, ctx().host_memory);
  }
  /// Values that the host does not look at.
  TensorView unseen(const Tensor& tensor) const {
    TensorView view = tensor;
    view.device = ctx().memory.device;
    return view;
  }

  std::unique_ptr<Runtime> runtime_;
};
INSTANTIATE_TEST_SUITE_P(, IndexChecks, ::testing::Values("auto", "plain"));

TEST_P(IndexChecks, ABadSlotIsSkipped) {
  constexpr std::int64_t kSlots = 8, kLatent = 12, kRope = 4;
  const Tensor rows = shared(DType::f32, {kSlots, kLatent + kRope});
  const PagedKvCache cache = PagedKvCache::view(rows.view().data, {DType::f32, kLatent + kRope},
                                                {.num_blocks = 2, .block_size = 4});
  const Tensor kv_c = shared(DType::f32, {4, kLatent}), k_pe = shared(DType::f32, {4, kRope});
  fill_normal(kv_c, 1);
  fill_normal(k_pe, 2);
  const Tensor slots = shared(DType::i64, {4});
  for (const std::int64_t bad : {std::int64_t{8}, std::int64_t{-2}}) {
    assign(rows, std::vector<double>(static_cast<std::size_t>(rows.view().numel()), NAN));
    assign(slots, std::vector<double>{3, -1, static_cast<double>(bad), 7});
    kv_append(ctx(), {kv_c, k_pe, unseen(slots), &cache});
    EXPECT_EQ(fault(), "slot_mapping[2] is " + std::to_string(bad) + ", but must be in [-1, 8)");
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      const bool written = slot == 3 || slot == 7;
      EXPECT_EQ(std::isnan(*rows.ptr<float>({slot, 0})), !written) << slot;
    }
  }
  assign(slots, std::vector<double>{3, -1, 2, 7});
  kv_append(ctx(), {kv_c, k_pe, unseen(slots), &cache});
  EXPECT_EQ(fault(), "");
}

TEST_P(IndexChecks, ARowAtABadPositionStays) {
  const Tensor cos_sin = shared(DType::f32, {16, 4}), x = shared(DType::f32, {3, 1, 4});
  fill_normal(cos_sin, 1);
  fill_normal(x, 2);
  const std::vector<double> before = to_doubles(x);
  const Tensor positions = shared(DType::i32, {3});
  assign(positions, std::vector<double>{15, 16, 0});
  rope(ctx(), {.x = x,
               .angles = {.positions = unseen(positions),
                          .cos_sin = cos_sin,
                          .pairing = RopePairing::neox,
                          .sections = {}}});
  EXPECT_EQ(fault(), "positions[1] is 16, but must be in [0, 16)");
  const std::vector<double> after = to_doubles(x);
  for (std::size_t t = 0; t < 3; ++t) EXPECT_EQ(before[4 * t] == after[4 * t], t == 1) << t;
}

TEST_P(IndexChecks, ARequestWithABadLengthOrBlockSeesNothing) {
  constexpr std::int64_t kRequests = 3, kHeads = 2, kLatent = 512, kRope = 64, kBlock = 16;
  const Tensor rows = shared(DType::bf16, {4 * kBlock, kLatent + kRope});
  const Tensor q = shared(DType::bf16, {kRequests, kHeads, kLatent + kRope});
  const Tensor out = shared(DType::bf16, {kRequests, kHeads, kLatent});
  fill_normal(rows, 1);
  fill_normal(q, 2);
  const PagedKvCache cache = PagedKvCache::view(rows.view().data, {DType::bf16, kLatent + kRope},
                                                {.num_blocks = 4, .block_size = kBlock});
  const Tensor lens = shared(DType::i32, {kRequests}), table = shared(DType::i32, {kRequests, 2});
  const std::vector<std::int32_t> query_start{0, 1, 2, 3}, most(kRequests, 2 * kBlock);
  DecodeSchedule schedule = schedule_decode(query_start, most, ctx().plan_target);
  schedule.device_seq_lens = lens.ptr<std::int32_t>();
  MlaDecodeParams params;
  params.q_latent = q.view().slice(2, 0, kLatent);
  params.q_pe = q.view().slice(2, kLatent, kLatent + kRope);
  params.cache = &cache;
  params.block_table = {table.ptr<std::int32_t>(), kRequests, 2, 2, ctx().memory.device};
  params.out = out;
  params.schedule = &schedule;
  params.sm_scale = 0.05f;
  ctx().workspace->reserve(workspace_bytes(ctx(), params));
  const auto decode = [&](const std::vector<double>& lengths, const std::vector<double>& blocks) {
    assign(lens, lengths);
    assign(table, blocks);
    mla_decode(ctx(), params);
    wait(ctx());
    std::vector<bool> sees;
    for (std::int64_t r = 0; r < kRequests; ++r) {
      const std::vector<double> row = to_doubles(out.view().slice(0, r, r + 1));
      sees.push_back(std::any_of(row.begin(), row.end(), [](double x) { return x != 0; }));
    }
    return sees;
  };
  using Sees = std::vector<bool>;
  EXPECT_EQ(decode({20, 16, 0}, {0, 1, 2, 99, 7, 7}), (Sees{true, true, false}));
  EXPECT_EQ(fault(), "");
  EXPECT_EQ(decode({20, 33, 5}, {0, 1, 2, 3, 3, 7}), (Sees{true, false, true}));
  EXPECT_EQ(fault(), "seq_lens[1] is 33, but must be in [0, 33)");
  EXPECT_EQ(decode({20, 17, 5}, {0, 1, 2, 4, 3, 7}), (Sees{true, false, true}));
  EXPECT_EQ(fault(), "block_table[3] is 4, but must be in [0, 4)");
}

}  // namespace
}  // namespace fovea::test
