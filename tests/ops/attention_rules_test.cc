// Windows, attention chunks, draft trees, sinks and soft caps, by every op that knows them.
#include "ops/gqa_problem.h"
#include "ops/mla_problem.h"
#include "ops/prefill_problem.h"

namespace fovea::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr AttentionVariant kCausalVariants[] = {
    {},
    {.window_left = 9},
    {.attention_chunk = 16},
    {.window_left = 20, .soft_cap = 2},
    {.window_left = 10, .attention_chunk = 20, .soft_cap = 5},
    {.window_left = 0},
};

class AttentionRules : public BackendTest {
 protected:
  void check(const GqaShape& shape, AttentionPath path, std::int32_t workers = 0) {
    SCOPED_TRACE(::testing::Message()
                 << "path " << static_cast<int>(path) << ", window " << shape.variant.window_left
                 << ", chunk " << shape.variant.attention_chunk << ", " << workers << " workers");
    GqaProblem problem(shape, dtype());
    problem.run(ctx(), path, workers);
    problem.check();
    if (!shape.aligned || path != AttentionPath::decode) return;
    const DecodeSchedule schedule = problem.decode_schedule(ctx(), workers, 16);
    AttentionDecodeParams params = problem.decode_params();
    params.schedule = &schedule;
    expect_fast(kAttentionDecode, params);
  }
};
FOVEA_FOR_EACH_BACKEND(AttentionRules);

TEST_P(AttentionRules, WindowsAreExactAroundTheirLength) {  // F244, B092, B101, B102, B076, B080
  // Keys before the window are NaN, in blocks whose ids are garbage.
  for (std::int32_t window : {1, 15, 16, 17, 33}) {
    for (std::int32_t seq_len : {window - 1, window, window + 1, window + 2, window + 70}) {
      for (AttentionPath path : kAttentionPaths) {
        GqaShape shape;
        shape.variant.window_left = window;
        shape.qk_dim = shape.v_dim = 16;
        shape.query_lens = {std::min(seq_len, 1), std::min(seq_len, 3)};
        shape.seq_lens = {seq_len, seq_len};
        check(shape, path, 2);
      }
    }
  }
}

TEST_P(AttentionRules, ChunksAreExactAroundTheirBorders) {  // B104
  for (std::int32_t chunk : {1, 16, 20, 33}) {
    for (std::int32_t seq_len : {chunk - 1, chunk, chunk + 1, 3 * chunk, 3 * chunk + 2}) {
      for (AttentionPath path : kAttentionPaths) {
        GqaShape shape;
        shape.variant.attention_chunk = chunk;
        shape.qk_dim = shape.v_dim = 16;
        shape.query_lens = {std::min(seq_len, 1), std::min(seq_len, 4)};
        shape.seq_lens = {seq_len, seq_len};
        check(shape, path, 2);
      }
    }
  }
}

TEST_P(AttentionRules, TheLastRowOfAPrefillIsADecodes) {  // B094
  for (const AttentionVariant& variant : kCausalVariants) {
    GqaShape shape;
    shape.variant = variant;
    shape.sinks = true;
    shape.wide_out = true;
    shape.query_lens = {60};
    shape.seq_lens = {75};
    GqaProblem prefill(shape, dtype());
    prefill.run_paged_prefill(ctx());
    const std::vector<double> row = to_doubles(prefill.out().select(0, 59));
    AttentionDecodeParams decode = prefill.decode_params();
    decode.q = decode.q.slice(0, 59, 60);
    decode.out = decode.out.slice(0, 59, 60);
    decode.lse = decode.lse.slice(1, 59, 60);
    attention_decode_once(ctx(), decode, std::vector<std::int32_t>{0, 1},
                          std::vector<std::int32_t>{75});
    // Either may round weights to bf16, by half a unit of 2^-8.
    const double tolerance = dtype() == DType::bf16 ? 0x1p-8 : 2e-5;
    EXPECT_TRUE(rows_close(row, prefill.out().select(0, 59), {tolerance, 2e-6}));
  }
}

TEST_P(AttentionRules, SplitsAndThreadsAgreeAndCountASinkOnce) {  // B023, B108, B109, F245
  GqaShape shape;
  shape.heads = 6;
  shape.sinks = true;
  shape.query_lens = {1, 2, 1};
  shape.seq_lens = {500, 3, 90};
  for (std::int64_t window : {-1, 100, 3}) {
    shape.variant.window_left = window;
    GqaProblem problem(shape, dtype());
    for (int threads : {1, 3}) {
      Runtime other(options_of(backend(), threads));
      for (std::int32_t workers : {1, 2, 5, 16}) {
        SCOPED_TRACE(::testing::Message() << threads << " threads, " << workers << " workers");
        problem.run_decode(other, workers);
        problem.check();
      }
    }
  }
}

TEST_P(AttentionRules, FollowsDraftTrees) {
  // Roots, branches and leaves; the second request is a chain, the third has two roots.
  GqaShape shape;
  shape.heads = 4;
  shape.qk_dim = 40;
  shape.v_dim = 24;
  shape.query_lens = {5, 4, 0, 3, 1};
  shape.seq_lens = {80, 4, 77, 33, 18};
  shape.draft_tree = {0b00001, 0b00011, 0b00101, 0b01101, 0b10011, 1, 3, 7, 15, 1, 2, 5, 1};
  for (const AttentionVariant& variant : kCausalVariants) {
    shape.variant = variant;
    for (bool sinks : {false, true}) {
      shape.sinks = sinks;
      ++shape.seed;
      shape.aligned = false;
      check(shape, AttentionPath::decode, 3);
      shape.aligned = true;
      check(shape, AttentionPath::decode, 1);
    }
  }
}

TEST_P(AttentionRules, DraftTreesReachSixtyFourTokens) {
  GqaShape shape;
  shape.qk_dim = shape.v_dim = 16;
  shape.query_lens = {64};
  shape.seq_lens = {100};
  for (int i = 0; i < 64; ++i) {  // A binary tree: the parent of i is (i - 1) / 2.
    std::uint64_t entry = 0;
    for (int at = i; at > 0; at = (at - 1) / 2) entry |= std::uint64_t{1} << at;
    shape.draft_tree.push_back(entry | 1);
  }
  shape.variant.window_left = 38;
  for (bool aligned : {false, true}) {
    shape.aligned = aligned;
    check(shape, AttentionPath::decode, 2);
  }
}

TEST_P(AttentionRules, NaNsOfOtherBranchesStayOut) {
  for (bool aligned : {false, true}) {
    GqaShape shape;
    shape.query_lens = {4};
    shape.seq_lens = {40};
    shape.draft_tree = {0b0001, 0b0011, 0b0101, 0b1101};
    shape.aligned = aligned;
    GqaProblem problem(shape, dtype());
    problem.run_decode(ctx());
    const Tensor clean = Tensor::empty(dtype(), {4, 4, 64});
    copy(problem.out(), clean);
    poison(problem.k_row(0, 37));  // Of token 1, which no other sees.
    poison(problem.v_row(0, 37));
    problem.run_decode(ctx());
    for (std::int64_t t : {0, 2, 3}) {
      EXPECT_TRUE(bits_equal(clean.view().select(0, t), problem.out().select(0, t)));
    }
    EXPECT_TRUE(all_nan(problem.out().select(0, 1)));
  }
}

TEST_P(AttentionRules, SinksFarFromTheScoresNeitherOverflowNorVanish) {  // B114
  for (AttentionPath path : kAttentionPaths) {
    GqaShape shape;
    shape.sinks = true;
    shape.wide_out = true;
    shape.query_lens = {2};
    shape.seq_lens = {90};
    GqaProblem problem(shape, dtype());
    const float sinks[] = {-kInfinity, 2000.f, -2000.f, 60.f};
    for (std::int64_t n = 0; n < 4; ++n) {
      *problem.sinks().ptr<float>({n}) = sinks[n];
    }
    for (std::int32_t workers : {1, 4}) {
      problem.run(ctx(), path, workers);
      // exp(-60) of a row: no absolute error may hide it.
      problem.check({attention_tolerance(dtype()).relative, 0});
      EXPECT_TRUE(all_zero(problem.out().select(1, 1)));
    }
    const Tensor with = Tensor::empty(DType::f32, {2, 4, 64});
    copy(problem.out(), with);
    GqaShape plain = shape;
    plain.sinks = false;
    GqaProblem without(plain, dtype());
    without.run(ctx(), path, 4);
    for (std::int64_t n : {0, 2}) {
      EXPECT_TRUE(bits_equal(without.out().select(1, n), with.view().select(1, n)));
    }
  }
}

TEST_P(AttentionRules, ASinkIsNotCapped) {  // B213, B214
  for (AttentionPath path : kAttentionPaths) {
    GqaShape shape;
    shape.variant.soft_cap = 2;
    shape.logit_stddev = 5000;
    shape.sinks = true;
    shape.wide_out = true;
    shape.query_lens = {3};
    shape.seq_lens = {40};
    GqaProblem problem(shape, dtype());
    for (std::int64_t n = 0; n < 4; ++n) *problem.sinks().ptr<float>({n}) = 5;
    problem.run(ctx(), path, 2);
    problem.check();
  }
}

TEST_P(AttentionRules, AScoreIsScaledBeforeItIsCapped) {  // B215
  for (AttentionPath path : kAttentionPaths) {
    GqaShape shape;
    shape.heads = shape.kv_heads = 1;
    shape.qk_dim = shape.v_dim = 1;
    shape.variant.soft_cap = 30;
    shape.query_lens = {1};
    shape.seq_lens = {1};
    GqaProblem problem(shape, dtype());
    problem.set_sm_scale(7.5f);
    assign(problem.q(), std::vector<double>{8});
    assign(problem.k_row(0, 0), std::vector<double>{1});
    problem.run(ctx(), path);
    EXPECT_TRUE(values_close(std::vector<double>{30 * std::tanh(2.0)}, problem.lse(), 1e-5));
  }
}

TEST_P(AttentionRules, CapsFarFromTheScoresNeitherBlurThemNorOverflow) {
  for (AttentionPath path : kAttentionPaths) {
    for (float cap : {1e-42f, 1e-20f, 1e4f, 1e6f, 3e38f}) {
      SCOPED_TRACE(testing::Message() << "path " << static_cast<int>(path) << ", cap " << cap);
      GqaShape shape;
      shape.variant.soft_cap = cap;
      shape.wide_out = true;
      shape.query_lens = {3};
      shape.seq_lens = {40};
      GqaProblem problem(shape, dtype());
      // A score of 0 is 0 whatever it is divided by.
      assign(problem.q().select(0, 1).select(0, 0), std::vector<double>(64));
      problem.run(ctx(), path, 2);
      problem.check();
    }
  }
}

TEST_P(AttentionRules, MlaDecodeFollowsThemAll) {
  MlaShape shape;
  shape.heads = 3;
  shape.latent = 48;
  shape.query_lens = {4, 1, 0, 6, 2};
  shape.seq_lens = {90, 33, 50, 6, 1};
  const AttentionVariant variants[] = {{.window_left = 9},
                                       {.attention_chunk = 16},
                                       {.window_left = 20, .soft_cap = 2},
                                       {.causal = false, .window_left = 30},
                                       {.window_left = 10, .attention_chunk = 20}};
  for (const AttentionVariant& variant : variants) {
    for (bool sinks : {false, true}) {
      for (std::int32_t workers : {1, 4}) {
        SCOPED_TRACE(::testing::Message() << "window " << variant.window_left << ", chunk "
                                          << variant.attention_chunk << ", sinks " << sinks);
        shape.variant = variant;
        shape.sinks = sinks;
        ++shape.seed;
        MlaProblem problem(shape, dtype());
        problem.run(ctx(), workers);
        problem.check();
      }
    }
  }
}

TEST_P(AttentionRules, MlaDecodeFollowsDraftTrees) {
  MlaShape shape;
  shape.query_lens = {5, 2, 0, 3};
  shape.seq_lens = {70, 2, 20, 40};
  shape.draft_tree = {0b00001, 0b00011, 0b00101, 0b01101, 0b10011, 1, 2, 1, 3, 5};
  for (const AttentionVariant& variant : kCausalVariants) {
    shape.variant = variant;
    shape.sinks = !shape.sinks;
    ++shape.seed;
    MlaProblem problem(shape, dtype());
    problem.run(ctx(), 3);
    problem.check();
  }
}

TEST_P(AttentionRules, MlaDecodeOfUsualRowsFollowsDraftTrees) {
  MlaShape shape;
  shape.latent = 512;
  shape.rope = 64;
  shape.aligned = true;
  shape.query_lens = {5, 2, 0, 3};
  shape.seq_lens = {70, 2, 20, 100};
  shape.draft_tree = {0b00001, 0b00011, 0b00101, 0b01101, 0b10011, 1, 2, 1, 3, 5};
  for (std::int64_t heads : {3, 6, 20}) {
    for (std::int64_t window : {-1, 40, 2}) {
      shape.heads = heads;
      shape.variant.window_left = window;
      shape.sinks = !shape.sinks;
      ++shape.seed;
      MlaProblem problem(shape, dtype());
      problem.run(ctx(), 3);
      problem.check();
      const DecodeSchedule schedule = problem.decode_schedule(ctx(), 3, 16);
      MlaDecodeParams params = problem.params();
      params.schedule = &schedule;
      expect_fast(kMlaDecode, params);
    }
  }
}

TEST_P(AttentionRules, PrefillWithASharedRopeKeyFollowsThemAll) {
  PrefillShape shape;
  shape.query_lens = {40, 3, 0, 9};
  shape.seq_lens = {40, 70, 5, 4};
  for (const AttentionVariant& variant : kCausalVariants) {
    for (bool sinks : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "window " << variant.window_left << ", chunk "
                                        << variant.attention_chunk << ", sinks " << sinks);
      shape.variant = variant;
      shape.sinks = sinks;
      ++shape.seed;
      PrefillProblem problem(shape, dtype());
      problem.run(ctx());
      problem.check();
    }
  }
}

/// Context in slices and the new tokens, each its own call, merged one after the other.
TEST_P(AttentionRules, SlicesOfContextMergeToTheWholeWithTheSinkInTheLastMerge) {  // B096, B097
  PrefillShape shape;
  shape.query_lens = {20};
  shape.seq_lens = {75};
  shape.wide_out = true;
  shape.sinks = true;
  for (const AttentionVariant& variant : kCausalVariants) {
    for (std::int32_t slice : {55, 20, 7}) {
      SCOPED_TRACE(::testing::Message() << "window " << variant.window_left << ", chunk "
                                        << variant.attention_chunk << ", slices of " << slice);
      shape.variant = variant;
      ++shape.seed;
      PrefillProblem problem(shape, dtype());
      const Tensor out = Tensor::zeros(DType::f32, {20, 4, 16});
      const Tensor lse = Tensor::empty(DType::f32, {4, 20});
      assign(lse, std::vector<double>(80, -kInfinity));
      // The context of 55 in slices, then the new tokens.
      for (std::int32_t begin = 0, end = 0; begin < 75; begin = end) {
        end = begin < 55 ? std::min(begin + slice, 55) : 75;
        AttentionPrefillParams part = problem.params();
        part.sinks = {};
        part.k = part.k.slice(0, begin, end);
        part.v = part.v.slice(0, begin, end);
        part.k_pe = part.k_pe.slice(0, begin, end);
        const std::vector<std::int32_t> cu_q{0, 20}, cu_k{0, end - begin};
        const PrefillSchedule schedule =
            schedule_prefill(cu_q, cu_k, 8, part.variant, {{55}, {begin}});
        part.schedule = &schedule;
        ctx().workspace->reserve(workspace_bytes(ctx(), part));
        poison(problem.out());
        poison(problem.lse());
        attention_prefill(ctx(), part);
        MergeStateParams merge{{out, lse}, {problem.out(), problem.lse()}, {out, lse}, {}};
        if (end == 75) merge.sinks = problem.sinks();
        merge_state(ctx(), merge);
      }
      const auto [expected_out, expected_lse] = problem.expected();
      EXPECT_TRUE(rows_close(expected_out, out, attention_tolerance(dtype())));
      EXPECT_TRUE(values_close(expected_lse, lse, kLseAbsolute, kLseRelative));
    }
  }
}

}  // namespace
}  // namespace fovea::test
