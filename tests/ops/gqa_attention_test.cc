// Grouped-query attention over every shape, variant and path against float64.
#include "ops/gqa_problem.h"

namespace fovea::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class GqaAttention : public BackendTest {
 protected:
  void check(const GqaShape& shape, AttentionPath path, std::int32_t workers = 0,
             std::int64_t tile = 16) {
    SCOPED_TRACE(::testing::Message()
                 << "path " << static_cast<int>(path) << ", " << shape.heads << " of "
                 << shape.kv_heads << " heads, widths " << shape.qk_dim << " and " << shape.v_dim
                 << ", window " << shape.variant.window_left << ", chunk "
                 << shape.variant.attention_chunk << ", cap " << shape.variant.soft_cap
                 << (shape.variant.causal ? ", causal" : "") << (shape.sinks ? ", sinks" : "")
                 << ", block " << shape.block_size << ", seed " << shape.seed);
    GqaProblem problem(shape, dtype());
    problem.run(ctx(), path, workers, tile);
    problem.check();
  }
};
FOVEA_FOR_EACH_BACKEND(GqaAttention);

struct Widths {
  std::int64_t qk, v;
};
constexpr Widths kWidths[] = {{64, 64},   {80, 80},   {96, 96}, {128, 128},
                              {256, 256}, {192, 128}, {13, 7}};
constexpr std::int64_t kGroups[] = {1, 3, 5, 7, 8, 12, 71};
constexpr std::int64_t kBlockSizes[] = {16, 1, 48, 64, 100};
constexpr AttentionVariant kVariants[] = {
    {},
    {.window_left = 9},
    {.attention_chunk = 16},
    {.window_left = 20, .soft_cap = 2},
    {.causal = false},
    {.causal = false, .window_left = 30},
    {.window_left = 10, .attention_chunk = 20, .soft_cap = 5},
    {.window_left = 0},
};

TEST_P(GqaAttention, MatchesFloat64ForAllWidthsAndGroups) {  // F236, F237, B168, B169, B171
  std::size_t turn = static_cast<std::size_t>(dtype());
  for (const Widths& widths : kWidths) {
    for (std::int64_t group : kGroups) {
      GqaShape shape;
      shape.qk_dim = widths.qk;
      shape.v_dim = widths.v;
      shape.kv_heads = group > 12 ? 1 : 2;
      shape.heads = group * shape.kv_heads;
      shape.block_size = kBlockSizes[turn % std::size(kBlockSizes)];
      shape.variant = kVariants[turn % std::size(kVariants)];
      shape.sinks = turn % 3 != 0;
      shape.one_cache = turn % 5 == 3;
      // Few rows where there are many heads: the reference takes its time.
      shape.query_lens = group > 5 ? std::vector<std::int32_t>{2} : std::vector<std::int32_t>{1, 5};
      shape.seq_lens =
          group > 5 ? std::vector<std::int32_t>{41} : std::vector<std::int32_t>{35, 20};
      shape.seed = ++turn;
      check(shape, kAttentionPaths[(turn + turn / 8) % 4]);
    }
  }
}

TEST_P(GqaAttention, EveryVariantOnEveryPath) {
  std::uint64_t seed = 0;
  for (const AttentionVariant& variant : kVariants) {
    for (AttentionPath path : kAttentionPaths) {
      GqaShape shape;
      shape.variant = variant;
      shape.sinks = seed % 2 == 0;
      shape.qk_dim = shape.v_dim = 24;
      shape.query_lens = {3, 1, 70};
      shape.seq_lens = {50, 90, 70};
      shape.seed = ++seed;
      check(shape, path, 3);
    }
  }
}

TEST_P(GqaAttention, MatchesFloat64ForRandomRaggedBatches) {
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    GqaShape shape;
    shape.seed = seed;
    shape.kv_heads = 1 + random_below(seed, 0, 3);
    shape.heads = shape.kv_heads * (1 + random_below(seed, 1, 4));
    shape.qk_dim = 1 + random_below(seed, 2, 40);
    shape.v_dim = 1 + random_below(seed, 3, 40);
    shape.block_size = kBlockSizes[random_below(seed, 4, 5)];
    shape.variant.causal = random_below(seed, 5, 4) != 0;
    if (random_below(seed, 6, 2) == 0) shape.variant.window_left = random_below(seed, 7, 60);
    if (shape.variant.causal && random_below(seed, 8, 3) == 0) {
      shape.variant.attention_chunk = 1 + random_below(seed, 9, 60);
    }
    if (random_below(seed, 10, 3) == 0) shape.variant.soft_cap = 3;
    shape.sinks = random_below(seed, 11, 2) == 0;
    shape.wide_out = random_below(seed, 12, 2) == 0;
    shape.head_major = random_below(seed, 13, 2) == 0;
    shape.one_cache = random_below(seed, 14, 2) == 0;
    shape.padding_rows = random_below(seed, 15, 4);
    const std::int64_t requests = 1 + random_below(seed, 16, 6);
    shape.query_lens.clear();
    shape.seq_lens.clear();
    for (std::uint64_t r = 0; r < static_cast<std::uint64_t>(requests); ++r) {
      // Also none, and more query tokens than keys.
      shape.query_lens.push_back(static_cast<std::int32_t>(random_below(seed, 20 + r, 12)));
      shape.seq_lens.push_back(static_cast<std::int32_t>(random_below(seed, 30 + r, 4) == 0
                                                             ? random_below(seed, 40 + r, 9)
                                                             : random_below(seed, 50 + r, 160)));
    }
    const AttentionPath path = kAttentionPaths[seed % 4];
    if (path == AttentionPath::context_prefill) {
      for (std::size_t r = 0; r < shape.seq_lens.size(); ++r) {
        shape.query_lens[r] = std::min(shape.query_lens[r], shape.seq_lens[r]);
      }
    }
    check(shape, path, static_cast<std::int32_t>(1 + random_below(seed, 60, 8)),
          16 * (1 + random_below(seed, 61, 3)));
  }
}

TEST_P(GqaAttention, VisibleNaNsComeThroughAndOthersRequestsStayClean) {  // B050
  for (AttentionPath path : kAttentionPaths) {
    GqaShape shape;
    shape.variant.window_left = 40;
    shape.query_lens = {1, 1, 1};
    shape.seq_lens = {60, 60, 60};
    GqaProblem problem(shape, dtype());
    problem.run(ctx(), path, 2);
    const Tensor clean = Tensor::empty(dtype(), {3, 4, 64});
    copy(problem.out(), clean);
    poison(problem.v_row(1, 19));  // The first that is seen.
    problem.run(ctx(), path, 2);
    for (std::int64_t t : {0, 2}) {
      EXPECT_TRUE(bits_equal(clean.view().select(0, t), problem.out().select(0, t)));
    }
    EXPECT_TRUE(all_nan(problem.out().select(0, 1)));
  }
}

TEST_P(GqaAttention, WritesTheEmptyStateWhereNoKeyIsVisible) {  // F230, B007, B009, B052
  for (AttentionPath path : kAttentionPaths) {
    if (path == AttentionPath::context_prefill) continue;  // Every query has a key there.
    GqaShape shape;
    shape.sinks = true;
    shape.query_lens = {1, 4, 0, 1, 1};
    shape.seq_lens = {0, 2, 77, 0, 21};
    shape.padding_rows = 3;
    GqaProblem problem(shape, dtype());
    *problem.sinks().ptr<float>({1}) = -kInfinity;
    problem.run(ctx(), path, 3);
    problem.check();
    for (std::int64_t t : {0, 1, 2, 5, 7, 8, 9}) {
      EXPECT_TRUE(all_zero(problem.out().select(0, t))) << "row " << t;
      for (std::int64_t n = 0; n < shape.heads; ++n) {
        EXPECT_EQ(*problem.lse().ptr<float>({n, t}), -kInfinity);
      }
    }
  }
}

TEST_P(GqaAttention, HeadsAndTokensOfEqualNumberAreNotMixedUp) {  // F012, B021
  for (AttentionPath path : kAttentionPaths) {
    GqaShape shape;
    shape.heads = 8;
    shape.query_lens = {3, 5};
    shape.seq_lens = {20, 37};
    shape.sinks = true;
    check(shape, path);
  }
}

TEST_P(GqaAttention, ReadsACacheOfAnotherDType) {
  for (DType cache_dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (AttentionPath path : {AttentionPath::decode, AttentionPath::paged_prefill}) {
      SCOPED_TRACE(name_of(cache_dtype));
      GqaShape shape;
      shape.cache_dtype = cache_dtype;
      shape.wide_out = true;
      shape.qk_dim = 72;
      shape.query_lens = {2, 20};
      shape.seq_lens = {33, 20};
      check(shape, path);
    }
  }
}

TEST_P(GqaAttention, LseIsOptional) {
  GqaShape shape;
  shape.sinks = true;
  GqaProblem problem(shape, dtype());
  const std::vector<double> expected = problem.expected().out;
  AttentionDecodeParams decode = problem.decode_params();
  decode.lse = {};
  poison(problem.out());
  attention_decode_once(ctx(), decode, problem.query_start_loc(), shape.seq_lens);
  EXPECT_TRUE(rows_close(expected, problem.out(), attention_tolerance(dtype())));
  AttentionPrefillParams prefill = problem.paged_prefill_params();
  prefill.lse = {};
  poison(problem.out());
  attention_prefill_once(ctx(), prefill, problem.query_start_loc(), problem.cu_k());
  EXPECT_TRUE(rows_close(expected, problem.out(), attention_tolerance(dtype())));
}

TEST_P(GqaAttention, ReadsStridedSinksAndWritesStridedOutputs) {
  GqaShape shape;
  shape.query_lens = {3};
  const GqaProblem problem(shape, dtype());
  const Tensor sinks = Tensor::empty(DType::f32, {4, 3});
  fill_normal(sinks, 1);
  const Tensor out = Tensor::empty(dtype(), {64, 3, 4}), lse = Tensor::empty(DType::f32, {3, 4});
  AttentionDecodeParams decode = problem.decode_params();
  decode.sinks = sinks.view().select(1, 1);
  decode.out = out.view().transpose(0, 1).transpose(1, 2);
  decode.lse = lse.view().transpose(0, 1);
  AttentionPrefillParams prefill = problem.paged_prefill_params();
  prefill.sinks = decode.sinks;
  prefill.out = decode.out;
  prefill.lse = decode.lse;
  // The same weights, of contiguous sinks.
  GqaShape with = shape;
  with.sinks = true;
  const GqaProblem reference(with, dtype());
  copy(decode.sinks, reference.sinks());
  const auto [expected, expected_lse] = reference.expected();
  for (bool decodes : {true, false}) {
    poison(out);
    poison(lse);
    if (decodes) {
      attention_decode_once(ctx(), decode, problem.query_start_loc(), shape.seq_lens);
    } else {
      attention_prefill_once(ctx(), prefill, problem.query_start_loc(), problem.cu_k());
    }
    EXPECT_TRUE(rows_close(expected, decode.out, attention_tolerance(dtype())));
    EXPECT_TRUE(values_close(expected_lse, decode.lse, kLseAbsolute, kLseRelative));
  }
}

}  // namespace
}  // namespace fovea::test
