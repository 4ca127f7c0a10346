// Bad operands: an error that names the argument, what it was and what it must be, and no byte
// written.
#include <functional>

#include "ops/mla_problem.h"
#include "ops/prefill_problem.h"

namespace fovea::test {
namespace {

constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
constexpr DType kBf16 = DType::bf16;

class Validation : public ::testing::Test {
 protected:
  const OpContext& ctx() const { return runtime_; }

 private:
  Runtime runtime_{options_of("reference", 1)};
};

struct BadMla {
  std::function<void(MlaDecodeParams&)> spoil;
  std::vector<std::string> parts;
};

TEST_F(Validation, MlaDecodeNamesWhatDoesNotFit) {
  MlaShape shape;
  shape.query_lens = {2, 1};
  shape.seq_lens = {20, 40};
  MlaProblem problem(shape, kBf16);
  const DecodeSchedule schedule =
      schedule_decode(problem.query_start_loc(), shape.seq_lens, ctx().plan_target);
  std::vector<std::int32_t> table(problem.params().block_table.data,
                                  problem.params().block_table.data + 10);
  const PagedKvCache narrow =
      PagedKvCache::allocate({kBf16, 39}, {.num_blocks = 1, .block_size = 1});
  DecodeSchedule changed = schedule;
  const Tensor f16 = Tensor::zeros(DType::f16, {3, 4, 32});

  const BadMla cases[] = {
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
      {[](auto& p) { p.schedule = nullptr; }, {"schedule is null", "schedule_decode", "_once"}},
      {[](auto& p) { p.block_table.requests = 1; }, {"block_table has 1 rows", "2 requests"}},
      {[](auto& p) { p.block_table.width = 2; },
       {"block_table has 2 columns", "request 1", "needs 3"}},
      {[](auto& p) { p.block_table.stride = 1; }, {"block_table", "stride 1"}},
      {[](auto& p) { p.block_table.data = nullptr; }, {"block_table.data is null"}},
      {[&](auto& p) {
         table[1] = 99;
         p.block_table.data = table.data();
       },
       {"block_table[0, 1] is 99", "[0, 8)"}},
      {[&](auto& p) {
         table[1] = 8;
         p.block_table.data = table.data();
       },
       {"block_table[0, 1] is 8", "[0, 8)"}},
      {[&](auto& p) {
         table[1] = -1;
         p.block_table.data = table.data();
       },
       {"block_table[0, 1] is -1", "[0, 8)"}},
      {[](auto& p) { p.q_latent.device.type = Device::Type::cuda; }, {"q_latent", "CPU"}},
      {[](auto& p) { p.q_latent.strides[0] = std::int64_t{1} << 61; }, {"q_latent", "64-bit"}},
      {[&](auto& p) {
         changed.query_start_loc.back() = 4;
         p.schedule = &changed;
       },
       {"query_start_loc ends at 4", "q_latent = 3"}},
      {[&](auto& p) {
         changed = schedule;
         changed.query_start_loc[1] = 3, changed.query_start_loc[2] = 2;
         p.schedule = &changed;
       },
       {"query_start_loc[2] is 2 after 3"}},
      {[&](auto& p) {
         changed = schedule;
         changed.seq_lens[0] = -5;
         p.schedule = &changed;
       },
       {"seq_lens[0] is -5"}},
      {[&](auto& p) {
         changed = schedule;
         changed.items[0].kv_end = 21;
         p.schedule = &changed;
       },
       {"[0, 21) of request 0"}},
      {[&](auto& p) {
         changed = schedule;
         changed.items.pop_back();
         changed.worker_begin.back() -= 1;
         p.schedule = &changed;
       },
       {"schedule has", "items"}},
      {[&](auto& p) {
         changed = schedule;
         changed.max_query_len = 1;
         p.schedule = &changed;
       },
       {"request 0 has 2 query tokens", "max_query_len = 1"}},
  };
  for (const auto& [spoil, parts] : cases) {
    SCOPED_TRACE(parts.front());
    MlaDecodeParams params = problem.params();
    params.schedule = &schedule;
    ctx().workspace->reserve(workspace_bytes(ctx(), params));
    spoil(params);
    const bool unsupported = parts.back() == "CPU";
    std::vector<std::string> all = parts;
    all.emplace_back("mla_decode");
    expect_error(unsupported ? ErrorCode::unsupported : kInvalid, all,
                 [&] { mla_decode(ctx(), params); });
    EXPECT_TRUE(all_nan(problem.out()));
    EXPECT_TRUE(all_nan(problem.lse()));
  }
}

TEST_F(Validation, AnOpSaysHowMuchWorkspaceItMisses) {
  MlaShape shape;
  MlaProblem problem(shape, kBf16);
  const DecodeSchedule schedule =
      schedule_decode(problem.query_start_loc(), shape.seq_lens, ctx().plan_target);
  MlaDecodeParams params = problem.params();
  params.schedule = &schedule;
  const std::int64_t needed = workspace_bytes(ctx(), params);
  ASSERT_GT(needed, 0);
  expect_error(ErrorCode::resource_exhausted,
               {"mla_decode: workspace has 0 bytes", "needs " + std::to_string(needed)},
               [&] { mla_decode(ctx(), params); });
  const std::int64_t short_of_it = needed - Workspace::kAlignment;
  ctx().workspace->reserve(short_of_it);
  expect_error(ErrorCode::resource_exhausted,
               {"workspace has " + std::to_string(short_of_it) + " bytes"},
               [&] { mla_decode(ctx(), params); });
  EXPECT_TRUE(all_nan(problem.out()));
  ctx().workspace->reserve(needed);
  mla_decode(ctx(), params);
  problem.check();
}

TEST_F(Validation, WorkspaceBytesNeedsNoData) {
  MlaShape shape;
  MlaProblem problem(shape, kBf16);
  const DecodeSchedule schedule =
      schedule_decode(problem.query_start_loc(), shape.seq_lens, ctx().plan_target);
  MlaDecodeParams params = problem.params();
  params.schedule = &schedule;
  const std::int64_t needed = workspace_bytes(ctx(), params);
  params.q_latent.data = params.q_pe.data = params.out.data = nullptr;
  params.block_table = {};
  EXPECT_EQ(workspace_bytes(ctx(), params), needed);
}

TEST_F(Validation, PrefillNamesWhatDoesNotFit) {
  PrefillShape shape;
  shape.heads = 6;
  shape.kv_heads = 3;
  PrefillProblem problem(shape, kBf16);
  const PrefillSchedule schedule = schedule_prefill(problem.cu_q(), problem.cu_k(), 8);
  PrefillSchedule changed;
  const struct {
    std::function<void(AttentionPrefillParams&)> spoil;
    std::vector<std::string> parts;
  } cases[] = {
      {[](auto& p) { p.q = {}; }, {"q is absent", "[Tq, N, Dk]"}},
      {[](auto& p) { p.k = p.k.slice(2, 0, 15); }, {"k is", "[20, 3, 15]", "Dk - R = 16"}},
      {[](auto& p) { p.k_pe = {}; }, {"k is", "Dk = 24"}},
      {[](auto& p) { p.k_pe = p.k_pe.slice(0, 0, 19); }, {"k_pe", "[19, 8]", "Tk = 20"}},
      {[](auto& p) { p.v = p.v.slice(1, 0, 2); }, {"v is", "Hk = 3"}},
      {[](auto& p) { p.v.dtype = DType::f16; }, {"v is f16", "must be bf16"}},
      {[](auto& p) { p.k = p.k.slice(1, 0, 0); }, {"N = 6", "Hk = 0", "multiple"}},
      {[](auto& p) { p.out = p.out.slice(1, 0, 5); }, {"out", "[20, 5, 16]", "N = 6"}},
      {[](auto& p) { p.out = p.q.slice(2, 0, 16); }, {"out", "shares memory with q"}},
      {[](auto& p) { p.lse = p.lse.transpose(0, 1); }, {"lse", "[20, 6]", "N = 6, Tq = 20"}},
      {[](auto& p) { p.sm_scale = -1; }, {"sm_scale is -1"}},
      {[](auto& p) { p.schedule = nullptr; }, {"schedule is null", "schedule_prefill"}},
      {[&](auto& p) {
         changed = schedule;
         changed.cu_seqlens_k.back() = 21;
         p.schedule = &changed;
       },
       {"cu_seqlens_k ends at 21", "k = 20"}},
      {[&](auto& p) {
         changed = schedule;
         changed.tiles.pop_back();
         p.schedule = &changed;
       },
       {"tiles have", "20 query rows"}},
      {[&](auto& p) {
         changed = schedule;
         changed.tiles[0].query_end += 1;
         changed.tiles[0].request = 7;
         p.schedule = &changed;
       },
       {"of request 7"}},
      {[&](auto& p) {
         changed = schedule;
         changed.max_seq_len = 3;
         p.schedule = &changed;
       },
       {"max_seq_len = 3"}},
  };
  for (const auto& [spoil, parts] : cases) {
    SCOPED_TRACE(parts.front());
    AttentionPrefillParams params = problem.params();
    params.schedule = &schedule;
    ctx().workspace->reserve(workspace_bytes(ctx(), params));
    spoil(params);
    expect_error(kInvalid, parts, [&] { attention_prefill(ctx(), params); });
    EXPECT_TRUE(all_nan(problem.out()));
    EXPECT_TRUE(all_nan(problem.lse()));
  }
}

TEST_F(Validation, AnOpWithoutImplementationsSaysSo) {
  const Backend* none[] = {nullptr};
  OpContext bare = ctx();
  bare.backends = std::span(none, 0);
  const Tensor x = Tensor::zeros(DType::f32, {1, 4}), weight = Tensor::zeros(DType::f32, {4});
  expect_error(kInvalid, {"rms_norm", "0 backends", "Runtime"}, [&] {
    rms_norm(bare, {x, weight, x});
  });
}

}  // namespace
}  // namespace fovea::test
