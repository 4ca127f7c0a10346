// Bad operands of mla_decode: an error that names the argument, what it was and what it must be,
// and no byte written.
#include <functional>

#include "ops/mla_problem.h"

namespace fovea::test {
namespace {

constexpr DType kBf16 = DType::bf16;

struct Bad {
  std::function<void(MlaDecodeParams&)> spoil;
  std::vector<std::string> parts;  ///< Of the error's text.
};

struct BadSchedule {
  std::function<void(DecodeSchedule&)> spoil;
  std::vector<std::string> parts;
};

class MlaValidation : public ::testing::Test {
 protected:
  MlaValidation()
      : problem_(shape(), kBf16),
        schedule_(
            schedule_decode(problem_.query_start_loc(), shape().seq_lens, ctx().plan_target)) {}

  static MlaShape shape() {
    MlaShape shape;
    shape.query_lens = {2, 1};
    shape.seq_lens = {20, 40};
    return shape;
  }

  const OpContext& ctx() const { return runtime_; }

  MlaDecodeParams params() const {
    MlaDecodeParams params = problem_.params();
    params.schedule = &schedule_;
    return params;
  }

  void expect_refused(const Bad& bad, ErrorCode code = ErrorCode::invalid_argument) {
    SCOPED_TRACE(bad.parts.front());
    MlaDecodeParams spoilt = params();
    ctx().workspace->reserve(workspace_bytes(ctx(), spoilt));
    bad.spoil(spoilt);
    std::vector<std::string> parts = bad.parts;
    parts.emplace_back("mla_decode");
    expect_error(code, parts, [&] { mla_decode(ctx(), spoilt); });
    EXPECT_TRUE(all_nan(problem_.out()));
    EXPECT_TRUE(all_nan(problem_.lse()));
  }

  Runtime runtime_{options_of("reference", 1)};
  MlaProblem problem_;
  DecodeSchedule schedule_;
};

TEST_F(MlaValidation, NamesTheOperandThatDoesNotFit) {
  const PagedKvCache narrow =
      PagedKvCache::allocate({kBf16, 39}, {.num_blocks = 1, .block_size = 1});
  const Tensor few_sinks = Tensor::zeros(DType::f32, {3});
  const Tensor f16 = Tensor::zeros(DType::f16, {3, 4, 32});
  const Bad cases[] = {
      {[](auto& p) { p.q_latent = {}; }, {"q_latent is absent", "[T, N, L]"}},
      {[](auto& p) { p.q_latent = p.q_latent.select(0, 0); },
       {"q_latent", "bf16[4, 32]", "[T, N, L]"}},
      {[](auto& p) { p.q_pe = p.q_pe.slice(0, 0, 2); },
       {"q_pe", "bf16[2, 4, 8]", "T = 3", "N = 4"}},
      {[](auto& p) { p.q_pe.dtype = DType::f16; }, {"q_pe", "f16[3, 4, 8]", "must be bf16"}},
      {[](auto& p) { p.q_latent.dtype = DType::i32; }, {"q_latent", "i32[", "f32, f16 or bf16"}},
      {[](auto& p) { p.cache = nullptr; }, {"cache is null", "40"}},
      {[&](auto& p) { p.cache = &narrow; }, {"cache has rows of 39", "L + R = 40"}},
      {[](auto& p) { p.out = p.out.slice(2, 0, 31); }, {"out", "[3, 4, 31]", "L = 32"}},
      {[&](auto& p) { p.out = f16; }, {"out", "f16[3, 4, 32]", "bf16 or f32"}},
      {[](auto& p) { p.out.data = nullptr; }, {"out", "null pointer"}},
      {[](auto& p) { p.out.strides[1] = 0; }, {"out", "strides [", "must not share memory"}},
      {[](auto& p) { p.out = p.q_latent; }, {"out", "shares memory with q_latent", "disjoint"}},
      {[](auto& p) { p.lse = p.lse.transpose(0, 1); }, {"lse", "f32[3, 4]", "N = 4, T = 3"}},
      {[](auto& p) { p.lse.dtype = DType::i32; }, {"lse", "i32[4, 3]", "must be f32"}},
      {[](auto& p) { p.sm_scale = 0; }, {"sm_scale is 0", "positive"}},
      {[](auto& p) { p.sm_scale = std::nanf(""); }, {"sm_scale is nan"}},
      {[&](auto& p) { p.sinks = few_sinks; }, {"sinks is f32[3]", "N = 4"}},
      {[](auto& p) { p.sinks = p.lse.select(1, 0); }, {"lse", "shares memory with sinks"}},
      {[](auto& p) { p.variant.soft_cap = -2; }, {"soft_cap is -2", "at least 0"}},
      {[](auto& p) { p.schedule = nullptr; }, {"schedule is null", "schedule_decode", "_once"}},
      {[](auto& p) { p.q_latent.strides[0] = std::int64_t{1} << 61; }, {"q_latent", "64-bit"}},
  };
  for (const Bad& bad : cases) expect_refused(bad);
  expect_refused(
      {[](auto& p) { p.q_latent.device.type = Device::Type::cuda; },
       {"q_latent", "on CUDA device 0", "the CPU"}},
      ErrorCode::unsupported);
}

TEST_F(MlaValidation, NamesTheBlockThatDoesNotExist) {
  const BlockTableView original = problem_.params().block_table;
  std::vector<std::int32_t> table(original.data, original.data + 2 * original.stride);
  for (std::int32_t block : {8, 99, -1, std::numeric_limits<std::int32_t>::min()}) {
    table[1] = block;
    expect_refused({[&](auto& p) { p.block_table.data = table.data(); },
                    {"block_table[0, 1] is " + std::to_string(block), "[0, 8)"}});
  }
  const Bad cases[] = {
      {[](auto& p) { p.block_table.requests = 1; }, {"block_table has 1 rows", "2 requests"}},
      {[](auto& p) { p.block_table.width = 2; },
       {"block_table has 2 columns", "request 1", "needs 3"}},
      {[](auto& p) { p.block_table.stride = 1; }, {"block_table", "stride 1"}},
      {[](auto& p) { p.block_table.data = nullptr; }, {"block_table.data is null"}},
  };
  for (const Bad& bad : cases) expect_refused(bad);
}

TEST_F(MlaValidation, RefusesAScheduleThatDoesNotFit) {
  const BadSchedule cases[] = {
      {[](auto& s) { s.query_start_loc.back() = 4; },
       {"query_start_loc ends at 4", "q_latent = 3"}},
      {[](auto& s) {
         s.query_start_loc = {0, 3, 2};
       },
       {"query_start_loc[2] is 2 after 3"}},
      {[](auto& s) {
         s.query_start_loc = {1, 2, 3};
       },
       {"query_start_loc", "starts at 1"}},
      {[](auto& s) { s.query_start_loc = {}; }, {"query_start_loc has 0 entries"}},
      {[](auto& s) { s.seq_lens.push_back(1); }, {"query_start_loc has 3", "seq_lens, 3"}},
      {[](auto& s) { s.seq_lens[0] = -5; }, {"seq_lens[0] is -5"}},
      {[](auto& s) { s.items[0].kv_end = 21; }, {"[0, 21) of request 0"}},
      {[](auto& s) { s.items[0].kv_begin = -1; }, {"[-1, 20) of request 0"}},
      {[](auto& s) { s.items[0].kv_begin = 1; },
       {"[1, 20) of request 0", "at the latest from key 0"}},
      {[](auto& s) { s.items[1].request = 2; }, {"of request 2"}},
      {[](auto& s) { s.items[1].partial = 0; }, {"of request 1 and partial 0", "partial -1"}},
      {[](auto& s) {
         s.items.pop_back();
         s.worker_begin.back() -= 1;
       },
       {"schedule has 1 items"}},
      {[](auto& s) { s.worker_begin.back() -= 1; }, {"worker_begin ends at 1", "items, 2"}},
      {[](auto& s) { s.partial_begin.pop_back(); }, {"partial_begin has 2 entries"}},
      {[](auto& s) { s.max_query_len = 1; }, {"request 0 has 2 query", "max_query_len = 1"}},
  };
  for (const auto& [spoil, parts] : cases) {
    DecodeSchedule spoilt = schedule_;
    spoil(spoilt);
    expect_refused({[&](auto& p) { p.schedule = &spoilt; }, parts});
  }
}

TEST_F(MlaValidation, SaysHowMuchWorkspaceIsMissing) {
  const std::int64_t needed = workspace_bytes(ctx(), params());
  ASSERT_GT(needed, 0);
  for (std::int64_t given : {std::int64_t{0}, needed - Workspace::kAlignment}) {
    ctx().workspace->reserve(given);
    expect_error(ErrorCode::resource_exhausted,
                 {"mla_decode: workspace has " + std::to_string(given) + " bytes",
                  "needs " + std::to_string(needed)},
                 [&] { mla_decode(ctx(), params()); });
  }
  EXPECT_TRUE(all_nan(problem_.out()));
  ctx().workspace->reserve(needed);
  mla_decode(ctx(), params());
  problem_.check();
}

TEST_F(MlaValidation, WorkspaceBytesNeedsNoData) {
  MlaDecodeParams without = params();
  without.q_latent.data = without.q_pe.data = without.out.data = nullptr;
  without.block_table = {};
  EXPECT_EQ(workspace_bytes(ctx(), without), workspace_bytes(ctx(), params()));
}

}  // namespace
}  // namespace fovea::test
