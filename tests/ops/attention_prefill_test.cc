// Ragged attention over every shape and layout against float64.
#include "ops/prefill_problem.h"

namespace fovea::test {
namespace {

class AttentionPrefill : public BackendTest {};
FOVEA_FOR_EACH_BACKEND(AttentionPrefill);

struct Widths {
  std::int64_t nope, rope, value;
};
constexpr Widths kWidths[] = {{16, 8, 16}, {128, 64, 128}, {192, 64, 256}, {64, 32, 64}, {5, 2, 7}};

TEST_P(AttentionPrefill, MatchesFloat64ForAllWidthsAndHeads) {  // F117
  std::uint64_t seed = 0;
  for (const Widths& widths : kWidths) {
    for (std::int64_t heads : {1, 3, 16, 20, 128}) {
      if (heads == 128 && widths.value != 128) continue;  // DeepSeek-V3's only.
      for (bool causal : {true, false}) {
        PrefillShape shape;
        shape.nope = widths.nope;
        shape.rope = widths.rope;
        shape.value = widths.value;
        shape.heads = shape.kv_heads = heads;
        shape.variant.causal = causal;
        const bool large = heads * widths.nope > 16 * 128;
        shape.query_lens =
            large ? std::vector<std::int32_t>{3, 5} : std::vector<std::int32_t>{17, 5};
        shape.seq_lens =
            large ? std::vector<std::int32_t>{3, 11} : std::vector<std::int32_t>{17, 70};
        shape.seed = ++seed;
        SCOPED_TRACE(::testing::Message() << heads << " heads, widths " << widths.nope << " "
                                          << widths.rope << " " << widths.value);
        PrefillProblem problem(shape, dtype());
        problem.run(ctx());
        problem.check();
      }
    }
  }
}

TEST_P(AttentionPrefill, MatchesFloat64ForRandomRaggedBatches) {
  for (std::uint64_t seed = 1; seed <= 16; ++seed) {
    PrefillShape shape;
    shape.seed = seed;
    shape.kv_heads = 1 + random_below(seed, 0, 3);
    shape.heads = shape.kv_heads * (1 + random_below(seed, 1, 4));
    shape.variant.causal = random_below(seed, 2, 3) != 0;
    shape.rope = 8 * random_below(seed, 3, 3);
    shape.wide_out = random_below(seed, 4, 2) != 0;
    shape.interleaved_kv = random_below(seed, 5, 2) != 0;
    shape.padding_rows = random_below(seed, 6, 4);
    const std::int64_t requests = 1 + random_below(seed, 7, 5);
    shape.query_lens.clear();
    shape.seq_lens.clear();
    for (std::uint64_t r = 0; r < static_cast<std::uint64_t>(requests); ++r) {
      shape.query_lens.push_back(static_cast<std::int32_t>(random_below(seed, 10 + r, 50)));
      shape.seq_lens.push_back(static_cast<std::int32_t>(
          random_below(seed, 30 + r, 4) == 0 ? 0 : random_below(seed, 50 + r, 90)));
    }
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    PrefillProblem problem(shape, dtype());
    problem.run(ctx(), 1 + random_below(seed, 8, 20));
    problem.check();
  }
}

TEST_P(AttentionPrefill, RequestsWithoutKeysGetTheEmptyState) {  // B006, B007, F363
  PrefillShape shape;
  shape.query_lens = {3, 2, 0, 6};
  shape.seq_lens = {0, 7, 5, 4};
  shape.padding_rows = 2;
  PrefillProblem problem(shape, dtype());
  problem.run(ctx());
  problem.check();
  for (std::int64_t t : {0, 1, 2, 5, 6, 11, 12}) {
    EXPECT_TRUE(all_zero(problem.out().select(0, t))) << "row " << t;
    EXPECT_EQ(*problem.lse().ptr<float>({3, t}), -std::numeric_limits<float>::infinity());
  }
}

TEST_P(AttentionPrefill, ValuesPaddedToTheKeysWidthChangeNothing) {  // F131, F132, B025, B028
  PrefillShape shape;
  shape.nope = 16;
  shape.rope = 8;
  shape.value = 16;
  PrefillProblem problem(shape, dtype());
  problem.run(ctx());
  problem.check();

  const Tensor padded_v = Tensor::zeros(dtype(), {20, 4, 24});
  copy(problem.v(), padded_v.view().slice(2, 0, 16));
  const PaddedTensor padded_out(dtype(), {20, 4, 24});
  AttentionPrefillParams params = problem.params();
  params.v = padded_v;
  params.out = padded_out;
  attention_prefill_once(ctx(), params, problem.cu_q(), problem.cu_k());
  EXPECT_TRUE(rows_close(to_doubles(problem.out()), padded_out.view().slice(2, 0, 16),
                         attention_tolerance(dtype())));
  EXPECT_TRUE(all_zero(padded_out.view().slice(2, 16, 24)));
}

TEST_P(AttentionPrefill, TransposedOperandsAreRead) {  // B032
  PrefillShape shape;
  shape.query_lens = shape.seq_lens = {9};
  PrefillProblem problem(shape, dtype());
  AttentionPrefillParams params = problem.params();
  // The innermost dimension is stored outermost.
  std::vector<Tensor> memory;
  const auto scatter = [&](TensorView& view) {
    memory.push_back(Tensor::empty(dtype(), {view.shape[2], view.shape[0], view.shape[1]}));
    const TensorView scattered = memory.back().view().transpose(0, 1).transpose(1, 2);
    copy(view, scattered);
    view = scattered;
  };
  scatter(params.q);
  scatter(params.k);
  scatter(params.v);
  const Tensor out_memory = Tensor::empty(dtype(), {16, 9, 4});
  params.out = out_memory.view().transpose(0, 1).transpose(1, 2);
  poison(problem.lse());
  attention_prefill_once(ctx(), params, problem.cu_q(), problem.cu_k());
  const auto [out, lse] = problem.expected();
  EXPECT_TRUE(rows_close(out, params.out, attention_tolerance(dtype())));
  EXPECT_TRUE(values_close(lse, problem.lse(), kLseAbsolute, kLseRelative));
}

TEST_P(AttentionPrefill, AQueryHeadReadsTheKeyHeadOfItsGroup) {
  for (std::int64_t group : {2, 3, 5, 7}) {
    SCOPED_TRACE(group);
    PrefillShape shape;
    shape.kv_heads = 2;
    shape.heads = 2 * group;
    shape.rope = 0;
    PrefillProblem problem(shape, dtype());
    problem.run(ctx());
    problem.check();
  }
}

TEST_P(AttentionPrefill, ThreadsAndTilesAgree) {
  PrefillShape shape;
  shape.query_lens = {100, 30, 1};
  shape.seq_lens = {100, 64, 50};
  PrefillProblem problem(shape, dtype());
  for (int threads : {1, 2, 3}) {
    Runtime other(options_of(backend(), threads));
    for (std::int64_t tile : {1, 7, 64, 1000}) {
      SCOPED_TRACE(::testing::Message() << threads << " threads, tiles of " << tile);
      problem.run(other, tile);
      problem.check();
    }
  }
}

TEST_P(AttentionPrefill, HeadsAndTokensOfEqualNumberAreNotMixedUp) {  // F012, B021
  PrefillShape shape;
  shape.heads = shape.kv_heads = 8;
  shape.query_lens = shape.seq_lens = {8};
  PrefillProblem problem(shape, dtype());
  problem.run(ctx());
  problem.check();
}

TEST_P(AttentionPrefill, LseIsOptional) {
  PrefillProblem problem({}, dtype());
  AttentionPrefillParams params = problem.params();
  params.lse = {};
  attention_prefill_once(ctx(), params, problem.cu_q(), problem.cu_k());
  EXPECT_TRUE(rows_close(problem.expected().out, problem.out(), attention_tolerance(dtype())));
}

TEST_P(AttentionPrefill, MaskedNaNsStayOutAndVisibleOnesComeThrough) {
  PrefillShape shape;
  shape.query_lens = {40, 30};
  shape.seq_lens = {40, 30};
  PrefillProblem problem(shape, dtype());
  problem.run(ctx());
  const Tensor clean = Tensor::empty(dtype(), {70, 4, 16});
  copy(problem.out(), clean);
  poison(problem.k().select(0, 25));
  poison(problem.v().select(0, 33));
  problem.run(ctx());
  const auto rows = [](const TensorView& view, std::int64_t begin, std::int64_t end) {
    return view.slice(0, begin, end);
  };
  EXPECT_TRUE(bits_equal(rows(clean, 0, 25), rows(problem.out(), 0, 25)));
  EXPECT_TRUE(bits_equal(rows(clean, 40, 70), rows(problem.out(), 40, 70)));
  EXPECT_TRUE(all_nan(rows(problem.out(), 25, 40)));
}

}  // namespace
}  // namespace fovea::test
