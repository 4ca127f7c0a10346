// Bad operands of grouped-query attention and its cache: an error that names the argument, what it
// was and what it must be, and no byte written.
#include <functional>

#include "ops/gqa_problem.h"

namespace fovea::test {
namespace {

constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
constexpr DType kBf16 = DType::bf16;

class GqaValidation : public ::testing::Test {
 protected:
  GqaValidation() : problem_(shape(), kBf16) {}

  static GqaShape shape() {
    GqaShape shape;
    shape.heads = 6;
    shape.kv_heads = 3;
    shape.qk_dim = 8;
    shape.v_dim = 4;
    shape.query_lens = {2, 1};
    shape.seq_lens = {20, 40};
    shape.sinks = true;
    return shape;
  }

  const OpContext& ctx() const { return runtime_; }

  template <class Params, class Op>
  void expect_refused(const Params& good, const std::function<void(Params&)>& spoil,
                      const std::vector<std::string>& parts, Op&& op, ErrorCode code = kInvalid) {
    SCOPED_TRACE(parts.front());
    ctx().workspace->reserve(workspace_bytes(ctx(), good));
    Params spoilt = good;
    spoil(spoilt);
    expect_error(code, parts, [&] { op(ctx(), spoilt); });
    EXPECT_TRUE(all_nan(problem_.out()));
    EXPECT_TRUE(all_nan(problem_.lse()));
  }

  Runtime runtime_{options_of("reference", 1)};
  GqaProblem problem_;
};

struct BadDecode {
  std::function<void(AttentionDecodeParams&)> spoil;
  std::vector<std::string> parts;
};

TEST_F(GqaValidation, DecodeNamesWhatDoesNotFit) {
  const DecodeSchedule schedule = problem_.decode_schedule(ctx(), 1, 16);
  AttentionDecodeParams good = problem_.decode_params();
  good.schedule = &schedule;
  const PagedKvCache narrow =
      PagedKvCache::allocate({kBf16, 23}, {.num_blocks = 8, .block_size = 16});
  const PagedKvCache few = PagedKvCache::allocate({kBf16, 12}, {.num_blocks = 4, .block_size = 16});
  const PagedKvCache bytes =
      PagedKvCache::allocate({DType::f16, 12}, {.num_blocks = 8, .block_size = 8});
  const Tensor bf16_sinks = Tensor::zeros(kBf16, {6});
  const BadDecode cases[] = {
      {[](auto& p) { p.q = {}; }, {"q is absent", "[T, N, Dk]"}},
      {[](auto& p) { p.q = p.q.slice(2, 0, 7); }, {"k_cache has rows of 24", "Hk * Dk = 21"}},
      {[](auto& p) { p.q.dtype = DType::i32; }, {"q is", "i32[", "f32, f16 or bf16"}},
      {[](auto& p) { p.kv.num_kv_heads = 4; }, {"N = 6", "num_kv_heads is 4", "multiple"}},
      {[](auto& p) { p.kv.num_kv_heads = 0; }, {"num_kv_heads is 0", "positive multiple"}},
      {[](auto& p) { p.kv.k_cache = nullptr; }, {"k_cache is null", "24"}},
      {[](auto& p) { p.kv.v_cache = nullptr; }, {"v_cache is null", "12"}},
      {[&](auto& p) { p.kv.k_cache = &narrow; }, {"k_cache has rows of 23", "Hk * Dk = 24"}},
      {[&](auto& p) { p.kv.v_cache = &few; }, {"v_cache has 4 blocks of 16", "8 of 16"}},
      {[&](auto& p) { p.kv.v_cache = &bytes; }, {"v_cache has 8 blocks of 8", "8 of 16"}},
      {[](auto& p) { p.out = p.out.slice(1, 0, 5); }, {"out", "[3, 5, 4]", "N = 6"}},
      {[](auto& p) { p.out = p.out.slice(2, 0, 3); }, {"v_cache has rows of 12", "Hk * Dv = 9"}},
      {[](auto& p) { p.out.dtype = DType::f16; }, {"out", "f16[3, 6, 4]", "bf16 or f32"}},
      {[](auto& p) { p.out.data = p.q.data; }, {"out", "shares memory with q"}},
      {[](auto& p) { p.out.data = p.kv.v_cache->row(2, 3); },
       {"out", "shares memory with v_cache"}},
      {[](auto& p) { p.lse = p.lse.transpose(0, 1); }, {"lse", "f32[3, 6]", "N = 6, T = 3"}},
      {[](auto& p) { p.lse.data = p.kv.k_cache->row(2, 3); },
       {"lse", "shares memory with k_cache"}},
      {[](auto& p) { p.sm_scale = 0; }, {"sm_scale is 0", "positive"}},
      {[](auto& p) { p.sinks = p.sinks.slice(0, 0, 5); }, {"sinks", "[5]", "N = 6"}},
      {[&](auto& p) { p.sinks = bf16_sinks; }, {"sinks is bf16[6]", "must be f32"}},  // B113
      {[](auto& p) { p.sinks.data = p.out.data; }, {"out", "shares memory with sinks"}},
      {[](auto& p) { p.variant.soft_cap = -1; }, {"soft_cap is -1", "at least 0"}},
      {[](auto& p) { p.variant.soft_cap = std::numeric_limits<float>::infinity(); },
       {"soft_cap is inf", "finite"}},
      {[](auto& p) { p.variant.attention_chunk = -3; }, {"attention_chunk is -3", "at least 0"}},
      {[](auto& p) {
         p.variant.causal = false;
         p.variant.attention_chunk = 3;
       },
       {"attention_chunk is 3", "non-causal"}},
      {[](auto& p) { p.schedule = nullptr; }, {"schedule is null", "schedule_decode", "_once"}},
  };
  for (const auto& [spoil, parts] : cases) {
    std::vector<std::string> all = parts;
    all.emplace_back("attention_decode");
    expect_refused<AttentionDecodeParams>(
        good, spoil, all, [](const auto& c, const auto& p) { attention_decode(c, p); });
  }
}

TEST_F(GqaValidation, DecodeRefusesAScheduleOfAnotherVariantOrTree) {
  AttentionDecodeParams good = problem_.decode_params();
  good.variant.window_left = 5;
  const PlanTarget target{.num_workers = 1, .decode_kv_tile = 8};
  const DecodeSchedule schedule =
      schedule_decode(problem_.query_start_loc(), shape().seq_lens, target, good.variant);
  good.schedule = &schedule;
  const auto run = [](const auto& c, const auto& p) { attention_decode(c, p); };
  // Items start at the window's tile: too late for a wider one.
  expect_refused<AttentionDecodeParams>(
      good, [](auto& p) { p.variant.window_left = 30; }, {"schedule item", "plan again"}, run);
  const struct {
    std::function<void(DecodeSchedule&)> spoil;
    std::vector<std::string> parts;
  } cases[] = {
      {[](auto& s) {
         s.draft_tree = {1, 3};
       },
       {"draft_tree has 2 entries", "3 query tokens"}},
      {[](auto& s) {
         s.draft_tree = {1, 3, 1};
         s.seq_lens[0] = 1;
       },
       {"request 0 has 2 query tokens", "draft tree", "1 keys"}},
  };
  for (const auto& [spoil, parts] : cases) {
    DecodeSchedule spoilt = schedule;
    spoil(spoilt);
    expect_refused<AttentionDecodeParams>(
        good, [&](auto& p) { p.schedule = &spoilt; }, parts, run);
  }
  DecodeSchedule tree = schedule;
  tree.draft_tree = {1, 3, 1};
  expect_refused<AttentionDecodeParams>(
      good,
      [&](auto& p) {
        p.schedule = &tree;
        p.variant = {.causal = false};
      },
      {"draft_tree", "non-causal"}, run);
}

TEST_F(GqaValidation, NamesTheBlockThatDoesNotExist) {  // B069
  AttentionDecodeParams decode = problem_.decode_params();
  const DecodeSchedule schedule = problem_.decode_schedule(ctx(), 1, 16);
  decode.schedule = &schedule;
  AttentionPrefillParams prefill = problem_.paged_prefill_params();
  const PrefillSchedule tiles = schedule_prefill(problem_.query_start_loc(), problem_.cu_k(), 16);
  prefill.schedule = &tiles;
  const BlockTableView original = problem_.paged().block_table;
  std::vector<std::int32_t> table(original.data, original.data + 2 * original.stride);
  const auto run_decode = [](const auto& c, const auto& p) { attention_decode(c, p); };
  const auto run_prefill = [](const auto& c, const auto& p) { attention_prefill(c, p); };
  for (std::int32_t block : {8, 99, -1}) {
    table[static_cast<std::size_t>(original.stride) + 2] = block;
    const std::vector<std::string> parts{"block_table[1, 2] is " + std::to_string(block), "[0, 8)"};
    expect_refused<AttentionDecodeParams>(
        decode, [&](auto& p) { p.kv.block_table.data = table.data(); }, parts, run_decode);
    expect_refused<AttentionPrefillParams>(
        prefill, [&](auto& p) { p.paged.block_table.data = table.data(); }, parts, run_prefill);
  }
  const struct {
    std::function<void(BlockTableView&)> spoil;
    std::vector<std::string> parts;
  } cases[] = {
      {[](auto& t) { t.requests = 1; }, {"block_table has 1 rows", "2 requests"}},
      {[](auto& t) { t.width = 2; }, {"block_table has 2 columns", "request 1", "needs 3"}},
      {[](auto& t) { t.stride = 1; }, {"block_table", "stride 1"}},
      {[](auto& t) { t.data = nullptr; }, {"block_table.data is null"}},
  };
  for (const auto& [spoil, parts] : cases) {
    expect_refused<AttentionDecodeParams>(
        decode, [&](auto& p) { spoil(p.kv.block_table); }, parts, run_decode);
    expect_refused<AttentionPrefillParams>(
        prefill, [&](auto& p) { spoil(p.paged.block_table); }, parts, run_prefill);
  }
}

TEST_F(GqaValidation, PagedPrefillNamesWhatDoesNotFit) {
  const PrefillSchedule tiles = schedule_prefill(problem_.query_start_loc(), problem_.cu_k(), 16);
  AttentionPrefillParams good = problem_.paged_prefill_params();
  good.schedule = &tiles;
  PrefillSchedule changed = tiles;
  changed.first_query = {18, 39};
  const Tensor k = Tensor::zeros(kBf16, {60, 3, 8});
  const struct {
    std::function<void(AttentionPrefillParams&)> spoil;
    std::vector<std::string> parts;
  } cases[] = {
      {[&](auto& p) { p.k = k; }, {"k is bf16[60, 3, 8]", "both must be there"}},
      {[&](auto& p) {
         p.k = k;
         p.v = k.view().slice(2, 0, 4);
       },
       {"k is bf16[60, 3, 8]", "Tq = 3"}},
      {[&](auto& p) { p.k_pe = k.view().select(1, 0); }, {"k_pe is bf16[60, 8]", "absent"}},
      {[](auto& p) { p.paged.v_cache = nullptr; }, {"v_cache is null", "12"}},
      {[](auto& p) { p.paged.k_cache = nullptr; }, {"k is absent"}},
      {[](auto& p) { p.paged.num_kv_heads = 5; }, {"N = 6", "num_kv_heads is 5"}},
      {[](auto& p) { p.out = p.out.slice(2, 0, 3); }, {"v_cache has rows of 12", "Hk * Dv = 9"}},
      {[](auto& p) { p.out.data = p.paged.k_cache->row(1, 1); },
       {"out", "shares memory with k_cache"}},
      {[](auto& p) { p.sinks = p.sinks.slice(0, 0, 4); }, {"sinks", "[4]", "N = 6"}},
      {[](auto& p) { p.variant.attention_chunk = -1; }, {"attention_chunk is -1"}},
      {[&](auto& p) { p.schedule = &changed; }, {"2 first_query and 0 first_key", "2 requests"}},
  };
  for (const auto& [spoil, parts] : cases) {
    expect_refused<AttentionPrefillParams>(
        good, spoil, parts, [](const auto& c, const auto& p) { attention_prefill(c, p); });
  }
}

TEST_F(GqaValidation, AppendWritesNothingWhenAnythingIsBad) {  // B069, B070
  const KvFormat k_format{kBf16, 24}, v_format{kBf16, 12};
  const Tensor memory = Tensor::empty(DType::u8, {48 * (24 + 12) * 2});
  poison(memory.view());
  const PagedKvCache k_cache =
      PagedKvCache::view(memory.view().data, k_format, {.num_blocks = 3, .block_size = 16});
  const PagedKvCache v_cache = PagedKvCache::view(
      memory.view().data, v_format,
      {.num_blocks = 3, .block_size = 16, .storage_offset = 48 * k_format.row_bytes()});
  const PagedKvCache small = PagedKvCache::allocate(v_format, {.num_blocks = 2, .block_size = 16});
  const Tensor k = Tensor::zeros(kBf16, {3, 3, 8}), v = Tensor::zeros(kBf16, {3, 3, 4});
  const Tensor table = Tensor::zeros(DType::f32, {10, 8}),
               wide = Tensor::zeros(DType::f32, {10, 10});
  const std::int64_t slots[] = {0, -1, 47}, beyond[] = {0, -1, 48}, negative[] = {0, -2, 1};
  const std::int32_t index[] = {4, 9, 0}, outside[] = {4, 10, 0};
  const auto i64 = [](const std::int64_t* data) { return TensorView::of(data, {3}); };
  const struct {
    std::function<void(GqaAppendParams&)> spoil;
    std::vector<std::string> parts;
  } cases[] = {
      {[](auto& p) { p.k = {}; }, {"k is absent", "[T, Hk, Dk]"}},
      {[](auto& p) { p.v = p.v.slice(1, 0, 2); }, {"v is", "[3, 2, 4]", "Hk = 3"}},
      {[](auto& p) { p.v.dtype = DType::f16; }, {"v is f16", "must be bf16"}},
      {[](auto& p) { p.k = p.k.slice(2, 0, 7); }, {"k_cache has rows of 24", "Hk * Dk = 21"}},
      {[](auto& p) { p.v_cache = nullptr; }, {"v_cache is null", "12"}},
      {[&](auto& p) { p.v_cache = &small; }, {"v_cache has 2 blocks of 16", "3 of 16"}},
      {[&](auto& p) { p.v_cache = p.k_cache; }, {"v_cache has rows of 24", "Hk * Dv = 12"}},
      {[&](auto& p) { p.slot_mapping = i64(beyond); }, {"slot_mapping[2] is 48", "[0, 48)"}},
      {[&](auto& p) { p.slot_mapping = i64(negative); }, {"slot_mapping[1] is -2", "-1 (skip)"}},
      {[](auto& p) { p.slot_mapping = p.slot_mapping.slice(0, 0, 2); }, {"slot_mapping", "T = 3"}},
      {[](auto& p) { p.slot_mapping.dtype = DType::u8; }, {"slot_mapping is u8", "i32 or i64"}},
      {[&](auto& p) { p.k.data = memory.view().data; }, {"k_cache", "shares memory with k"}},
      {[&](auto& p) { p.rope.cos_sin = wide; }, {"cos_sin", "[10, 10]", "at most Dk = 8"}},
      {[&](auto& p) { p.rope.cos_sin = wide.view().slice(1, 0, 7); },
       {"cos_sin", "[10, 7]", "even"}},
      {[](auto& p) { p.rope.positions = {}; }, {"positions is absent"}},
      {[](auto& p) { p.rope.cos_sin = {}; }, {"cos_sin is absent", "rope.positions"}},
      {[&](auto& p) { p.rope.positions = TensorView::of(outside, {3}); },
       {"positions[1] is 10", "[0, 10)"}},
      {[](auto& p) {
         p.rope.sections.pairs = {2, 1, 0};
       },
       {"sections.pairs are 2, 1 and 0", "= 4"}},
      {[](auto& p) {
         p.rope.sections.pairs = {2, 1, 1};
       },
       {"positions", "[3]", "[3, T]"}},
  };
  for (const auto& [spoil, parts] : cases) {
    SCOPED_TRACE(parts.front());
    GqaAppendParams params{k,          v,
                           i64(slots), &k_cache,
                           &v_cache,   {TensorView::of(index, {3}), table, RopePairing::neox, {}}};
    spoil(params);
    std::vector<std::string> all = parts;
    all.emplace_back("gqa_append");
    expect_error(kInvalid, all, [&] { gqa_append(ctx(), params); });
  }
  EXPECT_TRUE(still_poisoned(memory.view().data, memory.nbytes()));
}

TEST_F(GqaValidation, SaysHowMuchWorkspaceIsMissing) {
  AttentionDecodeParams decode = problem_.decode_params();
  const DecodeSchedule schedule = problem_.decode_schedule(ctx(), 3, 16);
  decode.schedule = &schedule;
  const std::int64_t needed = workspace_bytes(ctx(), decode);
  ASSERT_GT(needed, 0);
  const std::int64_t given = needed - Workspace::kAlignment;
  ctx().workspace->reserve(given);
  expect_error(ErrorCode::resource_exhausted,
               {"attention_decode: workspace has " + std::to_string(given) + " bytes",
                "needs " + std::to_string(needed)},
               [&] { attention_decode(ctx(), decode); });
  EXPECT_TRUE(all_nan(problem_.out()));
  AttentionDecodeParams without = decode;
  without.q.data = without.out.data = nullptr;
  without.kv.block_table = {};
  EXPECT_EQ(workspace_bytes(ctx(), without), needed);
}

}  // namespace
}  // namespace fovea::test
