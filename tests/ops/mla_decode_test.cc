// MLA decode over every shape, layout and split against float64.
#include "ops/mla_problem.h"

namespace fovea::test {
namespace {

class MlaDecode : public BackendTest {};
FOVEA_FOR_EACH_BACKEND(MlaDecode);

struct Ranks {
  std::int64_t latent;
  std::int64_t rope;
};
constexpr Ranks kRanks[] = {{32, 8}, {512, 64}, {256, 32}, {96, 16}, {7, 2}};
constexpr std::int64_t kHeadCounts[] = {1, 3, 16, 20, 128};
constexpr std::int64_t kBlockSizes[] = {1, 16, 48, 64, 100};

TEST_P(MlaDecode, MatchesFloat64ForAllRanksHeadsAndBlockSizes) {
  std::size_t turn = 0;
  for (const Ranks& ranks : kRanks) {
    for (std::int64_t heads : kHeadCounts) {
      MlaShape shape;
      shape.latent = ranks.latent;
      shape.rope = ranks.rope;
      shape.heads = heads;
      shape.block_size = kBlockSizes[turn % std::size(kBlockSizes)];
      const bool large = ranks.latent * heads > 16 * 512;
      shape.query_lens =
          large ? std::vector<std::int32_t>{1, 2} : std::vector<std::int32_t>{1, 4, 2};
      shape.seq_lens =
          large ? std::vector<std::int32_t>{49, 17} : std::vector<std::int32_t>{130, 65, 9};
      shape.seed = ++turn;
      SCOPED_TRACE(::testing::Message() << "heads " << heads << ", L " << ranks.latent << ", block "
                                        << shape.block_size);
      MlaProblem problem(shape, dtype());
      problem.run(ctx());
      problem.check();
    }
  }
}

TEST_P(MlaDecode, MatchesFloat64ForRandomRaggedBatches) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    MlaShape shape;
    shape.seed = seed;
    shape.heads = 1 + random_below(seed, 0, 6);
    shape.block_size = kBlockSizes[random_below(seed, 1, 5)];
    shape.variant.causal = random_below(seed, 2, 3) != 0;
    shape.layout = static_cast<QueryLayout>(random_below(seed, 3, 4));
    shape.wide_out = random_below(seed, 4, 2) != 0;
    shape.padding_rows = random_below(seed, 5, 4);
    const std::int64_t requests = 1 + random_below(seed, 6, 6);
    shape.query_lens.clear();
    shape.seq_lens.clear();
    for (std::uint64_t r = 0; r < static_cast<std::uint64_t>(requests); ++r) {
      // Also none, and more query tokens than keys.
      shape.query_lens.push_back(static_cast<std::int32_t>(random_below(seed, 10 + r, 9)));
      shape.seq_lens.push_back(static_cast<std::int32_t>(random_below(seed, 30 + r, 4) == 0
                                                             ? random_below(seed, 50 + r, 8)
                                                             : random_below(seed, 70 + r, 200)));
    }
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    MlaProblem problem(shape, dtype());
    problem.run(ctx(), static_cast<std::int32_t>(1 + random_below(seed, 7, 8)));
    problem.check();
  }
}

TEST_P(MlaDecode, ReadsAnyQueryLayout) {  // F021, F141, F142
  for (QueryLayout layout : {QueryLayout::separate, QueryLayout::concatenated,
                             QueryLayout::head_major, QueryLayout::reversed}) {
    SCOPED_TRACE(static_cast<int>(layout));
    MlaShape shape;
    shape.layout = layout;
    shape.latent = 64;
    shape.rope = 16;
    shape.heads = 5;
    shape.query_lens = {2, 3};
    shape.seq_lens = {40, 70};
    MlaProblem problem(shape, dtype());
    problem.run(ctx());
    problem.check();
  }
}

TEST_P(MlaDecode, ReadsHeadsOfAPaddedAllocation) {  // F143
  MlaShape shape;
  shape.heads = 8;
  MlaProblem problem(shape, dtype());
  // Of 8 heads 5 are real; the others are NaN, in the queries and wherever outputs may go.
  MlaDecodeParams params = problem.params();
  poison(params.q_latent.slice(1, 5, 8));
  poison(params.q_pe.slice(1, 5, 8));
  const auto real = [](const TensorView& view, int dim) { return view.slice(dim, 0, 5); };
  params.q_latent = real(params.q_latent, 1);
  params.q_pe = real(params.q_pe, 1);
  params.out = real(params.out, 1);
  params.lse = real(params.lse, 0);
  mla_decode_once(ctx(), params, problem.query_start_loc(), std::vector<std::int32_t>{33});
  const std::vector<double> all = problem.expected().out;
  EXPECT_TRUE(rows_close(std::span(all).first(5 * 32), params.out, attention_tolerance(dtype())));
  EXPECT_TRUE(all_nan(problem.out().slice(1, 5, 8)));
  EXPECT_TRUE(std::isnan(*problem.lse().ptr<float>({5, 0})));
}

TEST_P(MlaDecode, EveryQueryTokenOfASequenceSeesItsOwnKeys) {  // F146, B180
  for (std::int32_t query_len = 1; query_len <= 8; ++query_len) {
    SCOPED_TRACE(query_len);
    MlaShape shape;
    shape.query_lens = {query_len, query_len};
    shape.seq_lens = {query_len, 50};
    MlaProblem problem(shape, dtype());
    problem.run(ctx());
    problem.check();
  }
}

TEST_P(MlaDecode, WritesTheEmptyStateWhereNoKeyIsVisible) {  // B007, B009, B052
  MlaShape shape;
  shape.query_lens = {1, 4, 0, 1, 1};
  shape.seq_lens = {0, 2, 77, 0, 21};
  shape.padding_rows = 3;
  MlaProblem problem(shape, dtype());
  problem.run(ctx());
  problem.check();
  for (std::int64_t t : {0, 1, 2, 5, 7, 8, 9}) {
    EXPECT_TRUE(all_zero(problem.out().select(0, t))) << "row " << t;
    for (std::int64_t n = 0; n < shape.heads; ++n) {
      EXPECT_EQ(*problem.lse().ptr<float>({n, t}), -std::numeric_limits<float>::infinity());
    }
  }
}

TEST_P(MlaDecode, LengthsAroundBlockAndTileBordersAreExact) {  // B046, B047, B076, B077, B080
  for (std::int32_t border : {16, 32, 64, 128}) {
    for (std::int32_t seq_len : {border - 1, border, border + 1}) {
      SCOPED_TRACE(seq_len);
      MlaShape shape;
      shape.heads = 2;
      shape.query_lens = {1, 3};
      shape.seq_lens = {seq_len, seq_len};
      MlaProblem problem(shape, dtype());
      problem.run(ctx());
      problem.check();
    }
  }
}

TEST_P(MlaDecode, SplitsAndThreadsAgree) {  // B023
  MlaShape shape;
  shape.heads = 8;
  shape.query_lens = {1, 2, 1};
  shape.seq_lens = {700, 3, 90};
  MlaProblem problem(shape, dtype());
  for (int threads : {1, 2, 3}) {
    Runtime other(options_of(backend(), threads));
    for (std::int32_t workers : {1, 2, 3, 16}) {
      SCOPED_TRACE(::testing::Message() << threads << " threads, " << workers << " workers");
      problem.run(other, workers);
      problem.check();
    }
  }
}

TEST_P(MlaDecode, HeadsAndTokensOfEqualNumberAreNotMixedUp) {  // F012, B021
  MlaShape shape;
  shape.heads = 8;
  shape.query_lens = {3, 5};
  shape.seq_lens = {20, 37};
  MlaProblem problem(shape, dtype());
  problem.run(ctx());
  problem.check();
}

TEST_P(MlaDecode, ReadsACacheOfAnotherDType) {
  for (DType cache_dtype : {DType::f32, DType::f16, DType::bf16}) {
    SCOPED_TRACE(name_of(cache_dtype));
    MlaShape shape;
    shape.cache_dtype = cache_dtype;
    shape.wide_out = true;
    MlaProblem problem(shape, dtype());
    problem.run(ctx());
    problem.check();
  }
}

TEST_P(MlaDecode, LseIsOptional) {
  MlaShape shape;
  MlaProblem problem(shape, dtype());
  MlaDecodeParams params = problem.params();
  mla_decode_once(ctx(), params, problem.query_start_loc(), shape.seq_lens);
  const Tensor with_lse = Tensor::empty(dtype(), {1, shape.heads, shape.latent});
  copy(problem.out(), with_lse);
  params.lse = {};
  poison(problem.out());
  mla_decode_once(ctx(), params, problem.query_start_loc(), shape.seq_lens);
  EXPECT_TRUE(bits_equal(with_lse, problem.out()));
}

TEST_P(MlaDecode, OtherRequestsNaNsChangeNothing) {  // B050
  MlaShape shape;
  shape.query_lens = {1, 1, 1};
  shape.seq_lens = {100, 100, 100};
  MlaProblem problem(shape, dtype());
  problem.run(ctx(), 2);
  Tensor clean = Tensor::empty(dtype(), {3, shape.heads, shape.latent});
  copy(problem.out(), clean);
  for (std::int64_t j = 0; j < 100; ++j) poison(problem.key_row(1, j));
  problem.run(ctx(), 2);
  for (std::int64_t t : {0, 2}) {
    EXPECT_TRUE(bits_equal(clean.view().select(0, t), problem.out().select(0, t)));
  }
  EXPECT_TRUE(all_nan(problem.out().select(0, 1)));
}

}  // namespace
}  // namespace fovea::test
