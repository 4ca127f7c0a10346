// Cases find what is wrong with a kernel: each op is run as it is, and with one value spoiled.
#include <gtest/gtest.h>

#include <array>
#include <bit>

#include "backends/reference/backend.h"
#include "cases/operands.h"
#include "cases/rules.h"
#include "cases/suites.h"
#include "fovea/error.h"
#include "fovea/runtime.h"
#include "support/poison.h"

namespace fovea::cases {
namespace {

/// Far above rounding, far below what shows at a glance.
constexpr double kSpoil = 0.3;

void spoil(const TensorView& view) {
  if (view.numel() == 0) return;
  auto* first = static_cast<std::byte*>(view.data);
  test::store_element(view.dtype, first, test::load_element(view.dtype, first) + kSpoil);
}

void spoiled_rms_norm(const OpContext& ctx, const RmsNormParams& params) {
  reference_backend().rms_norm[0].run(ctx, params);
  spoil(params.out);
}
void spoiled_rope(const OpContext& ctx, const RopeParams& params) {
  reference_backend().rope[0].run(ctx, params);
  spoil(params.x);
}
void spoiled_kv_append(const OpContext& ctx, const KvAppendParams& params) {
  reference_backend().kv_append[0].run(ctx, params);
  const std::int64_t slot = *params.slot_mapping.ptr<std::int64_t>({0});
  spoil(TensorView::contiguous(params.cache->slot(slot), params.cache->format().dtype, {1}));
}
void spoiled_kv_gather(const OpContext& ctx, const KvGatherParams& params) {
  reference_backend().kv_gather[0].run(ctx, params);
  spoil(params.out);
}
void spoiled_prefill(const OpContext& ctx, const AttentionPrefillParams& params) {
  reference_backend().attention_prefill[0].run(ctx, params);
  spoil(params.out);
}
void spoiled_prefill_lse(const OpContext& ctx, const AttentionPrefillParams& params) {
  reference_backend().attention_prefill[0].run(ctx, params);
  spoil(params.lse);
}
void spoiled_decode(const OpContext& ctx, const MlaDecodeParams& params) {
  reference_backend().mla_decode[0].run(ctx, params);
  spoil(params.out);
}
void spoiled_decode_lse(const OpContext& ctx, const MlaDecodeParams& params) {
  reference_backend().mla_decode[0].run(ctx, params);
  if (params.lse) spoil(params.lse);
}
void spoiled_gqa_append(const OpContext& ctx, const GqaAppendParams& params) {
  reference_backend().gqa_append[0].run(ctx, params);
  const std::int64_t slot = *params.slot_mapping.ptr<std::int64_t>({0});
  spoil(TensorView::contiguous(params.v_cache->slot(slot), params.v_cache->format().dtype, {1}));
}
void spoiled_attention_decode(const OpContext& ctx, const AttentionDecodeParams& params) {
  reference_backend().attention_decode[0].run(ctx, params);
  spoil(params.out);
}
void spoiled_merge(const OpContext& ctx, const MergeStateParams& params) {
  reference_backend().merge_state[0].run(ctx, params);
  spoil(params.result.out);
}

template <class Params>
Implementation<Params> with_run(std::span<const Implementation<Params>> good,
                                void (*run)(const OpContext&, const Params&)) {
  return {"spoiled", good[0].declines, good[0].workspace_bytes, run};
}

/// The reference backend with one op replaced.
struct SpoiledBackend {
  const Backend& good = reference_backend();
  Implementation<RmsNormParams> rms_norm = with_run(good.rms_norm, spoiled_rms_norm);
  Implementation<RopeParams> rope = with_run(good.rope, spoiled_rope);
  Implementation<KvAppendParams> kv_append = with_run(good.kv_append, spoiled_kv_append);
  Implementation<KvGatherParams> kv_gather = with_run(good.kv_gather, spoiled_kv_gather);
  Implementation<AttentionPrefillParams> prefill =
      with_run(good.attention_prefill, spoiled_prefill);
  Implementation<AttentionPrefillParams> prefill_lse =
      with_run(good.attention_prefill, spoiled_prefill_lse);
  Implementation<MlaDecodeParams> decode = with_run(good.mla_decode, spoiled_decode);
  Implementation<MlaDecodeParams> decode_lse = with_run(good.mla_decode, spoiled_decode_lse);
  Implementation<GqaAppendParams> gqa_append = with_run(good.gqa_append, spoiled_gqa_append);
  Implementation<AttentionDecodeParams> attention_decode =
      with_run(good.attention_decode, spoiled_attention_decode);
  Implementation<MergeStateParams> merge = with_run(good.merge_state, spoiled_merge);
};

CheckResult check(const Backend& backend, const std::string& line) {
  RuntimeOptions options;
  options.backend = "reference";
  options.num_threads = 2;
  const Runtime runtime(options);
  OpContext ctx = runtime.context();
  const std::array<const Backend*, 1> backends = {&backend};
  ctx.backends = backends;
  const auto problem = make_problem(CaseLine::parse(line), ctx);
  problem->run();
  return problem->check();
}

class EveryOp : public ::testing::TestWithParam<const char*> {
 protected:
  void expect_spoiled(Backend backend) const {
    const CheckResult good = check(reference_backend(), GetParam());
    EXPECT_TRUE(good.passed()) << good.worst_error << " at " << good.worst_place;
    const CheckResult bad = check(backend, GetParam());
    EXPECT_FALSE(bad.passed()) << "the spoiled value was not found";
    EXPECT_NE(bad.worst_place, "");
  }
};

TEST_P(EveryOp, PassesAndIsFoundOutWhenOneValueIsWrong) {
  const SpoiledBackend spoiled;
  Backend backend = reference_backend();
  backend.rms_norm = {&spoiled.rms_norm, 1};
  backend.rope = {&spoiled.rope, 1};
  backend.kv_append = {&spoiled.kv_append, 1};
  backend.kv_gather = {&spoiled.kv_gather, 1};
  backend.attention_prefill = {&spoiled.prefill, 1};
  backend.mla_decode = {&spoiled.decode, 1};
  backend.merge_state = {&spoiled.merge, 1};
  backend.gqa_append = {&spoiled.gqa_append, 1};
  backend.attention_decode = {&spoiled.attention_decode, 1};
  expect_spoiled(backend);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, EveryOp,
    ::testing::Values("rms_norm f32 tokens=3 dim=9 pad=2", "rope f16 tokens=4 heads=2 dim=6",
                      "kv_append bf16 tokens=5 kv_lora_rank=8 rope=2 block_size=3",
                      "kv_gather f32 lens=4,0,9 starts=2,1,0 row=7 block_size=3",
                      "attention_prefill f32 heads=4 kv_heads=2 tokens=5,3 qk=12 rope=4 v=6 pad=1",
                      "attention_prefill bf16 heads=2 tokens=5 keys=9 qk=8 v=6 causal=0",
                      "mla_decode f16 heads=3 kv=20,0,7 q=1,2,1 kv_lora_rank=8 rope=4 padding=2",
                      "mla_decode f32 heads=2 kv=40 q=6 kv_lora_rank=8 rope=4 tree=fork window=9",
                      "attention_decode f32 heads=6 kv_heads=2 qk=8 v=5 kv=70,9 q=2 window=20 "
                      "sinks=1 soft_cap=9 block_size=4 pad=3",
                      "attention_decode bf16 heads=4 kv_heads=4 qk=16 kv=50 q=7 tree=chain",
                      "attention_prefill f32 heads=4 kv_heads=2 tokens=9 keys=50 qk=16 "
                      "block_size=4 attention_chunk=12 sinks=1",
                      "attention_prefill f16 heads=2 tokens=20 qk=8 v=8 window=5 soft_cap=7",
                      "gqa_append f32 tokens=7 kv_heads=2 qk=6 v=4 rope=4 block_size=3 pad=1",
                      "gqa_append bf16 tokens=7 kv_heads=2 qk=6 cache=f32",
                      "merge_state f32 tokens=6 heads=2 dim=5 empty=30 sinks=1",
                      "merge_state f32 tokens=6 heads=2 dim=5 empty=30 alias=prefix",
                      "mla_layer f32 q=1,6 context=9,20 workspace_rows=16",
                      "mla_layer f32 q=1 context=30 q_lora_rank=8 absorption=full pairing=neox"));

TEST(Cases, FindAWrongLse) {
  const SpoiledBackend spoiled;
  Backend backend = reference_backend();
  backend.attention_prefill = {&spoiled.prefill_lse, 1};
  backend.mla_decode = {&spoiled.decode_lse, 1};
  EXPECT_FALSE(check(backend, "attention_prefill f32 heads=2 tokens=4 qk=8 v=8").passed());
  EXPECT_FALSE(check(backend, "mla_decode f32 heads=2 kv=9 kv_lora_rank=8 rope=4").passed());
}

TEST(Cases, RandomOnesAreReadAsTheyArePrinted) {
  for (const std::string& op : case_ops()) {
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      const CaseLine line = random_case(op, DType::bf16, seed);
      EXPECT_EQ(CaseLine::parse(line.to_text()).to_text(), line.to_text());
      EXPECT_EQ(random_case(op, DType::bf16, seed).to_text(), line.to_text());
    }
  }
}

TEST(Cases, BuiltInSuitesAreWellFormed) {
  const Runtime runtime;
  for (const Suite& suite : kSuites) {
    const std::vector<CaseLine> lines = parse_case_lines(suite.text);
    EXPECT_GT(lines.size(), 3u) << suite.name;
    for (const CaseLine& line : lines) {
      EXPECT_NE(std::find(case_ops().begin(), case_ops().end(), line.op()), case_ops().end())
          << line.to_text();
    }
  }
}

TEST(Cases, RefuseWhatTheyDoNotUnderstand) {
  const Runtime runtime;
  for (const char* text :
       {"rms_norm f32 tokens", "rms_norm f32 tokens=", "rms_norm f32 tokens=-1",
        "rms_norm f32 tokens=1 tokens=2", "rms_norm f32 rows=3", "softmax f32",
        "rope f32 pairing=odd", "mla_decode f32 kv=1,x", "mla_decode f32 kv=9 q=3 tree=bush",
        "attention_prefill f32 tokens=4 tree=chain", "attention_decode f32 kv=3 q=9 tree=chain",
        "attention_decode f32 kv=9 causal=0 attention_chunk=4", "gqa_append f32 rope=3"}) {
    EXPECT_THROW(make_problem(CaseLine::parse(text), runtime), Error) << text;
  }
}

/// Pairs counted one by one, by the definition of each rule.
double counted_pairs(const Rules& rules, std::int64_t queries, std::int64_t keys) {
  const std::int64_t context = keys - queries;
  double pairs = 0;
  for (std::int64_t q = 0; q < queries; ++q) {
    const auto position = [&](std::int64_t j) {
      return rules.draft_tree.empty() || j < 0
                 ? context + j
                 : context + std::popcount(rules.draft_tree[static_cast<std::size_t>(j)]) - 1;
    };
    for (std::int64_t k = 0; k < keys; ++k) {
      const std::int64_t distance = position(q) - position(k - context);
      bool sees = !rules.variant.causal || k - context <= q;
      if (!rules.draft_tree.empty() && k >= context) {
        sees = (rules.draft_tree[static_cast<std::size_t>(q)] >> (k - context) & 1) != 0;
      }
      const std::int64_t window = rules.variant.window_left, chunk = rules.variant.attention_chunk;
      if (window >= 0 && distance > window) sees = false;
      if (chunk > 0 && position(q) >= 0 && position(k - context) / chunk != position(q) / chunk) {
        sees = false;
      }
      pairs += sees ? 1 : 0;
    }
  }
  return pairs;
}

TEST(Cases, CountOnlyVisiblePairs) {
  for (const char* line : {"x f32", "x f32 causal=0", "x f32 window=2", "x f32 window=1 causal=0",
                           "x f32 attention_chunk=3", "x f32 window=3 attention_chunk=4"}) {
    SCOPED_TRACE(line);
    Random random(1);
    const Rules rules = read_rules(OpContext{}, CaseLine::parse(line), 1, random);
    for (std::int64_t queries = 0; queries < 7; ++queries) {
      for (std::int64_t keys = 0; keys < 12; ++keys) {
        EXPECT_EQ(rules.visible_pairs(0, queries, keys), counted_pairs(rules, queries, keys))
            << queries << " " << keys;
      }
    }
  }
  for (const char* line : {"x f32 tree=chain", "x f32 tree=fork", "x f32 tree=fork window=2"}) {
    SCOPED_TRACE(line);
    Random random(1);
    const Rules rules = read_decode_rules(OpContext{}, CaseLine::parse(line), 1, {0, 7}, random);
    for (std::int64_t keys = 7; keys < 12; ++keys) {
      EXPECT_EQ(rules.visible_pairs(0, 7, keys), counted_pairs(rules, 7, keys)) << keys;
    }
  }
}

}  // namespace
}  // namespace fovea::cases
