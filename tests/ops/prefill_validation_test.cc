// Bad operands of attention_prefill: an error that names the argument, what it was and what it must
// be, and no byte written.
#include <functional>

#include "ops/prefill_problem.h"

namespace fovea::test {
namespace {

constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
constexpr DType kBf16 = DType::bf16;

class PrefillValidation : public ::testing::Test {
 protected:
  const OpContext& ctx() const { return runtime_; }

 private:
  Runtime runtime_{options_of("reference", 1)};
};

TEST_F(PrefillValidation, NamesWhatDoesNotFit) {
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

}  // namespace
}  // namespace fovea::test
