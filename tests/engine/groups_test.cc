// Models with several KV groups: windows, blocks that are given back, prefixes, preemption, drafts.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/serving.h"
#include "fovea/block_pool.h"
#include "fovea/oracle.h"

namespace fovea {
namespace {

using test::Outcome;
using test::same_outputs;
using test::serve;

constexpr std::int64_t kWidth = 48;   // Hidden size of the tiny models.
constexpr std::int64_t kWindow = 20;  // Their sliding_window.

/// Prompts on both sides of the window and of block borders; some share prefixes.
Workload mixed_workload() {
  Workload workload{"mixed", 11, {}};
  const std::int32_t prompts[] = {1, 19, 20, 21, 90, 64, 33, 110};
  for (std::int32_t i = 0; i < 8; ++i) {
    RequestSpec spec;
    spec.prompt_tokens = prompts[i];
    spec.answer_tokens = 3 + i * 5 % 13;
    if (i % 2 == 1) {
      spec.prefix_group = 0;
      spec.prefix_tokens = std::min(spec.prompt_tokens, 50 + i);
    }
    workload.requests.push_back(spec);
  }
  return workload;
}

EngineOptions baseline_options() {
  EngineOptions options;
  options.block_size = 4;
  options.max_num_seqs = 5;
  options.token_budget = 120;
  return options;
}

/// NaN for every block that no table of its group holds any more, and for the slots of drafts that
/// turn out wrong. Only without prefix reuse, which finds freed blocks again.
class FreedBlockPoisoner : public StepObserver {
 public:
  explicit FreedBlockPoisoner(const Model& model) : model_(model) {}

  void on_layer(const LayerTrace& trace) override {
    std::map<std::int64_t, std::set<std::int32_t>>& held = held_[trace.layer];
    for (std::size_t i = 0; i < trace.request_of.size(); ++i) {
      const std::int32_t* blocks =
          trace.block_table.data + static_cast<std::int64_t>(i) * trace.block_table.stride;
      const std::int64_t block_size = trace.cache->block_size();
      const std::int64_t count = (trace.seq_lens[i] + block_size - 1) / block_size;
      std::set<std::int32_t> now(blocks, blocks + count);
      now.erase(BlockTable::kNoBlock);
      for (const std::int32_t block : held[trace.request_of[i]]) {
        if (!now.contains(block)) freed_[trace.layer].insert(block);
      }
      held[trace.request_of[i]] = std::move(now);
      poison_wrong_drafts(trace, i, blocks);
    }
    for (const std::int32_t block : freed_[trace.layer]) {
      const bool is_held = std::any_of(held.begin(), held.end(), [&](const auto& of_request) {
        return of_request.second.contains(block);
      });
      if (is_held) continue;
      ++poisoned_blocks;
      for (std::int64_t row = 0; row < trace.cache->block_size(); ++row) {
        poison(trace, trace.cache->row(block, row));
      }
    }
    freed_[trace.layer].clear();
  }
  std::int64_t poisoned_blocks = 0;
  std::int64_t poisoned_drafts = 0;

 private:
  void poison_wrong_drafts(const LayerTrace& trace, std::size_t i, const std::int32_t* blocks) {
    const std::int64_t block_size = trace.cache->block_size();
    for (std::int32_t row = trace.query_start_loc[i] + trace.num_true_rows[i];
         row < trace.query_start_loc[i + 1]; ++row) {
      const std::int64_t position = trace.positions[static_cast<std::size_t>(row)];
      poison(trace, trace.cache->row(blocks[position / block_size], position % block_size));
      ++poisoned_drafts;
    }
  }
  static void poison(const LayerTrace& trace, std::byte* row) {
    std::memset(row, 0xff, static_cast<std::size_t>(trace.cache->format().row_bytes()));
  }

  const Model& model_;
  /// [layers][requests] Requests that are done or put back keep theirs until others get them.
  std::map<std::int64_t, std::map<std::int64_t, std::set<std::int32_t>>> held_;
  std::map<std::int64_t, std::set<std::int32_t>> freed_;
};

class GroupRuns : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_.emplace(test::make_tiny_gqa_model({.family = GetParam()}));
    const Runtime runtime({.num_threads = 1});
    baseline_ = serve(runtime, *model_, mixed_workload(), baseline_options());
    check(baseline_);
  }

  void check(const Outcome& outcome) const {
    EXPECT_EQ(outcome.report.finished, 8);
    EXPECT_TRUE(outcome.report.refused.empty());
    EXPECT_GT(outcome.verified_rows, 100);
    EXPECT_LT(outcome.worst_error, Verifier::limit(DType::f32)) << outcome.worst_row;
    if (!baseline_.outputs.empty()) {
      EXPECT_TRUE(same_outputs(baseline_, outcome, kWidth, 1e-4));
    }
  }
  /// Runs with other options: every request answered, verified, and equal to the baseline.
  Outcome check(const EngineOptions& options, std::vector<StepObserver*> observers = {},
                const RuntimeOptions& runtime_options = {.num_threads = 1}) const {
    const Runtime runtime(runtime_options);
    Outcome outcome = serve(runtime, *model_, mixed_workload(), options, std::move(observers));
    check(outcome);
    return outcome;
  }

  std::optional<Model> model_;
  Outcome baseline_;
};

TEST_P(GroupRuns, AWindowsBlocksAreFreedAndTheReportShowsIt) {
  ASSERT_EQ(baseline_.report.kv_groups.size(), 2u);
  const KvGroupReport& windowed = baseline_.report.kv_groups[0];
  const KvGroupReport& full = baseline_.report.kv_groups[1];
  EXPECT_EQ(windowed.variant.window_left, kWindow - 1);
  EXPECT_EQ(full.variant.window_left, -1);
  for (const KvGroupReport& group : baseline_.report.kv_groups) {
    EXPECT_EQ(group.num_layers, 2);
    EXPECT_EQ(group.block_bytes, 2 * 4 * (2 * (16 + 16)) * 4) << "2 layers, 4 rows of f32";
    EXPECT_LE(group.peak_blocks, group.num_blocks);
  }
  EXPECT_GT(windowed.freed_blocks, 20);
  EXPECT_EQ(full.freed_blocks, 0);
  EXPECT_LT(windowed.peak_blocks, full.peak_blocks);
  EXPECT_LT(windowed.peak_blocks, windowed.peak_blocks_unfreed);
  EXPECT_EQ(baseline_.report.cache_bytes,
            windowed.num_blocks * windowed.block_bytes + full.num_blocks * full.block_bytes);
  EXPECT_EQ(baseline_.report.peak_context_rows, 0) << "nothing is gathered";
  EXPECT_GT(baseline_.report.prefix_hit_tokens, 0);
}

TEST_P(GroupRuns, FreedBlocksAreNotReadAgain) {
  EngineOptions options = baseline_options();
  options.prefix_reuse = false;
  for (const std::int64_t budget : {1, 7, 120}) {
    SCOPED_TRACE(budget);
    options.token_budget = budget;
    FreedBlockPoisoner poisoner(*model_);
    check(options, {&poisoner});
    // Of a request alone every freed block is taken again at once.
    if (budget > 100) {
      EXPECT_GT(poisoner.poisoned_blocks, 20);
    }
  }
}

TEST_P(GroupRuns, BlocksBudgetThreadsAndBackendsDoNotMatter) {
  EngineOptions options = baseline_options();
  options.block_size = 1;
  check(options);
  options.block_size = 64;
  options.token_budget = 33;
  check(options, {}, {.num_threads = 3});
  options.block_size = 5;
  options.max_num_seqs = 1;
  options.prefix_reuse = false;
  check(options, {}, {.backend = "reference", .num_threads = 1});
}

TEST_P(GroupRuns, FewBlocksPutRequestsBackAndDoNotMatter) {
  EngineOptions options = baseline_options();
  options.num_blocks = 33;  // The longest request needs 31 of the full group.
  for (const bool reuse : {false, true}) {
    SCOPED_TRACE(reuse);
    options.prefix_reuse = reuse;
    options.draft_tokens = reuse ? 3 : 0;
    const Outcome outcome = check(options);
    EXPECT_LE(outcome.report.kv_groups[0].num_blocks, 33);
    EXPECT_EQ(outcome.report.kv_groups[1].num_blocks, 33);
  }
}

TEST_P(GroupRuns, DraftsDoNotMatter) {
  for (const double acceptance : {0.0, 0.5, 1.0}) {
    SCOPED_TRACE(acceptance);
    EngineOptions options = baseline_options();
    options.draft_tokens = 3;
    options.draft_acceptance = acceptance;
    options.prefix_reuse = false;
    FreedBlockPoisoner poisoner(*model_);
    const Outcome outcome = check(options, {&poisoner});
    const ServeReport& report = outcome.report;
    EXPECT_EQ(report.answer_tokens, baseline_.report.answer_tokens);
    EXPECT_GT(report.drafted_tokens, 40);
    EXPECT_EQ(poisoner.poisoned_drafts, 4 * (report.drafted_tokens - report.accepted_tokens));
    EXPECT_EQ(report.accepted_tokens == 0, acceptance == 0);
    EXPECT_EQ(report.accepted_tokens == report.drafted_tokens, acceptance == 1);
    EXPECT_GE(report.tokens_per_decode, 1);
    EXPECT_EQ(report.tokens_per_decode > 1, acceptance > 0);
    options.prefix_reuse = true;
    options.token_budget = 9;
    check(options);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GroupRuns, ::testing::Values("gpt_oss", "gemma3_text"));

TEST(Drafts, DoNotMatterToLatentAttention) {
  const Model model = test::make_tiny_model();
  const Runtime runtime({.num_threads = 2});
  EngineOptions options = baseline_options();
  options.workspace_rows = 64;
  const Outcome baseline = serve(runtime, model, mixed_workload(), options);
  for (const double acceptance : {0.0, 0.5, 1.0}) {
    SCOPED_TRACE(acceptance);
    options.draft_tokens = 4;
    options.draft_acceptance = acceptance;
    options.prefix_reuse = acceptance == 0.5;
    FreedBlockPoisoner poisoner(model);
    std::vector<StepObserver*> observers;
    if (!options.prefix_reuse) observers.push_back(&poisoner);
    const Outcome outcome = serve(runtime, model, mixed_workload(), options, observers);
    EXPECT_TRUE(same_outputs(baseline, outcome, kWidth, 1e-4));
    EXPECT_LT(outcome.worst_error, Verifier::limit(DType::f32)) << outcome.worst_row;
    EXPECT_EQ(outcome.report.answer_tokens, baseline.report.answer_tokens);
    EXPECT_EQ(outcome.report.accepted_tokens == outcome.report.drafted_tokens, acceptance == 1);
  }
}

TEST(Drafts, AcceptanceIsAFunctionOfSeedRequestAndPosition) {
  const Model model = test::make_tiny_model({.num_layers = 1});
  Workload workload{"long", 3, {}};
  for (std::int32_t i = 0; i < 4; ++i) workload.requests.push_back({0, 9, 200, -1, 0});
  const auto accepted = [&](std::int64_t max_num_seqs, double acceptance, std::uint64_t seed) {
    const Runtime runtime({.num_threads = 1});
    EngineOptions options;
    options.max_num_seqs = max_num_seqs;
    options.draft_tokens = 1;
    options.draft_acceptance = acceptance;
    workload.seed = seed;
    const ServeReport report = Engine(runtime, model, options).serve(workload);
    EXPECT_EQ(report.answer_tokens, 800);
    return std::pair(report.accepted_tokens, report.drafted_tokens);
  };
  const auto [count, drafted] = accepted(4, 0.7, 3);
  EXPECT_EQ(accepted(1, 0.7, 3), std::pair(count, drafted)) << "batch mates do not matter";
  EXPECT_NE(accepted(4, 0.7, 4).first, count);
  EXPECT_NEAR(static_cast<double>(count) / static_cast<double>(drafted), 0.7, 0.08);
}

TEST(GroupDtypes, SmallDtypesVerifyInBothFamilies) {
  for (const char* family : {"gpt_oss", "gemma3_text"}) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      SCOPED_TRACE(std::string(family) + " " + std::string(name_of(dtype)));
      const Model model = test::make_tiny_gqa_model(
          {.family = family, .num_layers = 2, .dtype = dtype, .logit_spread = 0.7, .width = 3});
      const Runtime runtime({.num_threads = 2});
      EngineOptions options = baseline_options();
      options.draft_tokens = 2;
      const Outcome outcome = serve(runtime, model, mixed_workload(), options);
      EXPECT_EQ(outcome.report.finished, 8);
      EXPECT_LT(outcome.worst_error, Verifier::limit(dtype)) << outcome.worst_row;
    }
  }
}

/// What goes into a layer is what went into the one before, and that layer's normed output.
class NormedStreamReader : public StepObserver {
 public:
  explicit NormedStreamReader(const Model& model) : model_(model) {}
  void on_layer(const LayerTrace& trace) override {
    const std::int64_t H = trace.input.shape[1];
    const auto* input = static_cast<const float*>(trace.input.data);
    const auto* output = static_cast<const float*>(trace.output.data);
    const std::size_t count = static_cast<std::size_t>(trace.input.shape[0] * H);
    for (std::size_t i = 0; trace.layer > 0 && i < count; ++i) {
      ASSERT_NEAR(input[i], expected_[i], 1e-5 * (1 + std::abs(expected_[i])));
    }
    layers_seen += trace.layer > 0 ? 1 : 0;
    const auto* weight =
        static_cast<const float*>(model_.layer(trace.layer).post_attention_layernorm.view().data);
    const std::vector<double> outputs(output, output + count);
    expected_ = oracle::rms_norm(outputs, std::vector<double>(weight, weight + H),
                                 model_.config().rms_norm_eps);
    for (std::size_t i = 0; i < count; ++i) expected_[i] += input[i];
  }
  std::int64_t layers_seen = 0;

 private:
  const Model& model_;
  std::vector<double> expected_;  ///< [T, H]
};

TEST(GroupStream, OutputsAreNormedBeforeTheResidual) {
  const Model model = test::make_tiny_gqa_model({.family = "gemma3_text"});
  const Runtime runtime({.num_threads = 2});
  NormedStreamReader reader(model);
  ServeHooks hooks;
  hooks.observers = {&reader};
  EXPECT_EQ(Engine(runtime, model, baseline_options()).serve(mixed_workload(), hooks).finished, 8);
  EXPECT_GT(reader.layers_seen, 20);
}

TEST(GroupOptions, RefuseWhatTheKindOfAttentionCannotHonour) {
  const Model gqa = test::make_tiny_gqa_model({.num_layers = 1});
  const Model mla = test::make_tiny_model({.num_layers = 1});
  const Runtime runtime({.num_threads = 1});
  const auto refuse = [&](const Model& model, ErrorCode code, auto&& change) {
    EngineOptions options;
    change(options);
    return test::error_of(code, [&] { Engine(runtime, model, options); });
  };
  using O = EngineOptions;
  EXPECT_EQ(refuse(gqa, ErrorCode::invalid_argument,
                   [](O& o) { o.context_plan = ContextPlanKind::packed; }),
            "context_plan is packed, must be paged for gpt_oss: grouped-query attention reads "
            "context from its blocks");
  EXPECT_TRUE(
      test::mentions(refuse(gqa, ErrorCode::invalid_argument, [](O& o) { o.workspace_rows = 64; }),
                     {"workspace_rows is 64, must be left out for gpt_oss"}));
  EXPECT_TRUE(test::mentions(refuse(mla, ErrorCode::invalid_argument,
                                    [](O& o) { o.context_plan = ContextPlanKind::paged; }),
                             {"context_plan is paged, must be packed or equal for deepseek_v3"}));
  EXPECT_EQ(refuse(mla, ErrorCode::invalid_argument, [](O& o) { o.draft_tokens = 64; }),
            "draft_tokens is 64, must be from 0 to 63");
  EXPECT_EQ(refuse(mla, ErrorCode::invalid_argument, [](O& o) { o.draft_acceptance = 1.5; }),
            "draft_acceptance is 1.5, must be from 0 to 1");
  const std::int64_t context = 8;
  EXPECT_TRUE(
      test::mentions(test::error_of(ErrorCode::unsupported,
                                    [&] { compare_methods(runtime, gqa, std::span(&context, 1)); }),
                     {"gpt_oss has no latent cache"}));
}

TEST(Groups, WithoutLayersAreLeftOut) {
  // The first layer alone: windowed, and nothing sees everything.
  const Model model = test::make_tiny_gqa_model({.num_layers = 1});
  const Runtime runtime({.num_threads = 1});
  EngineOptions options = baseline_options();
  options.num_blocks = 12;
  const Outcome outcome = serve(runtime, model, mixed_workload(), options);
  ASSERT_EQ(outcome.report.kv_groups.size(), 1u);
  EXPECT_EQ(outcome.report.kv_groups[0].num_blocks, 12);
  EXPECT_EQ(outcome.report.finished, 8) << "of up to 31 blocks, six at a time are seen";
  EXPECT_LT(outcome.worst_error, Verifier::limit(DType::f32)) << outcome.worst_row;
}

}  // namespace
}  // namespace fovea
