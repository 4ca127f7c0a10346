// Whole runs on a tiny model: what must not change results, and what is reported.
#include "fovea/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "engine/serving.h"

namespace fovea {
namespace {

using test::Outcome;
using test::same_outputs;
using test::serve;

constexpr std::int64_t kWidth = 48;  // Hidden size of the tiny model.

/// Prompts of one token and of many, whole blocks and not, half of them with shared prefixes.
Workload mixed_workload() {
  Workload workload{"mixed", 11, {}};
  const std::int32_t prompts[] = {1, 16, 17, 90, 64, 33, 2, 130, 48, 15, 100, 32};
  for (std::int32_t i = 0; i < 12; ++i) {
    RequestSpec spec;
    spec.prompt_tokens = prompts[i];
    spec.answer_tokens = 1 + i * 5 % 13;
    if (i % 2 == 1) {
      spec.prefix_group = i % 4 / 2;
      spec.prefix_tokens = std::min(spec.prompt_tokens, 40 + i);
    }
    workload.requests.push_back(spec);
  }
  return workload;
}

EngineOptions baseline_options() {
  EngineOptions options;
  options.max_num_seqs = 6;
  options.token_budget = 200;
  options.workspace_rows = 65536;
  return options;
}

class EngineRuns : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    model_ = new Model(test::make_tiny_model());
    const Runtime runtime({.num_threads = 1});
    baseline_ = new Outcome(serve(runtime, *model_, mixed_workload(), baseline_options()));
  }
  static void TearDownTestSuite() {
    delete baseline_;
    delete model_;
  }

  /// Runs with other options: every request answered, verified, and equal to the baseline.
  static Outcome check(const EngineOptions& options,
                       const RuntimeOptions& runtime_options = {.num_threads = 1}) {
    const Runtime runtime(runtime_options);
    Outcome outcome = serve(runtime, *model_, mixed_workload(), options);
    EXPECT_EQ(outcome.report.finished, 12);
    EXPECT_EQ(outcome.report.unfinished, 0);
    EXPECT_TRUE(outcome.report.refused.empty());
    EXPECT_TRUE(same_outputs(*baseline_, outcome, kWidth, 1e-4));
    EXPECT_GT(outcome.verified_rows, 40);
    EXPECT_LT(outcome.worst_error, Verifier::limit(DType::f32)) << outcome.worst_row;
    return outcome;
  }

  static inline Model* model_ = nullptr;
  static inline Outcome* baseline_ = nullptr;
};

TEST_F(EngineRuns, BaselineReusesPrefixesAndMixesPromptsWithAnswers) {
  const ServeReport& report = baseline_->report;
  EXPECT_EQ(report.finished, 12);
  EXPECT_GT(report.prefix_hit_tokens, 0);
  EXPECT_EQ(report.preemptions, 0);
  EXPECT_GT(report.peak_context_rows, 0);
  EXPECT_GT(report.decode_steps, 0);
  EXPECT_LT(report.decode_steps, report.steps);
  EXPECT_LT(baseline_->worst_error, Verifier::limit(DType::f32)) << baseline_->worst_row;
}

TEST_F(EngineRuns, ThreadsDoNotMatter) { check(baseline_options(), {.num_threads = 2}); }

TEST_F(EngineRuns, BackendsDoNotMatter) {
  check(baseline_options(), {.backend = "reference", .num_threads = 1});
}

TEST_F(EngineRuns, BlockSizeDoesNotMatter) {
  for (std::int64_t block_size : {1, 64, 100}) {
    SCOPED_TRACE(block_size);
    EngineOptions options = baseline_options();
    options.block_size = block_size;
    check(options);
  }
}

TEST_F(EngineRuns, WorkspaceRowsAreHonouredAndDoNotMatter) {
  for (std::int64_t rows : {16, 64, 100}) {
    SCOPED_TRACE(rows);
    EngineOptions options = baseline_options();
    options.workspace_rows = rows;
    const Outcome outcome = check(options);
    EXPECT_LE(outcome.report.peak_context_rows, rows);
    EXPECT_GT(outcome.report.peak_context_rows, 0);
    EXPECT_LT(outcome.report.workspace_bytes, baseline_->report.workspace_bytes);
  }
}

TEST_F(EngineRuns, ContextPlanDoesNotMatter) {
  EngineOptions options = baseline_options();
  options.context_plan = ContextPlanKind::equal;
  options.token_budget = 40;
  options.workspace_rows = 16 * 6;
  check(options);
}

TEST_F(EngineRuns, TokenBudgetDoesNotMatter) {
  for (std::int64_t budget : {1, 7, 173, 8192}) {
    SCOPED_TRACE(budget);
    EngineOptions options = baseline_options();
    options.token_budget = budget;
    check(options);
  }
}

TEST_F(EngineRuns, BatchMatesDoNotMatter) {
  EngineOptions options = baseline_options();
  options.max_num_seqs = 1;
  check(options);
}

TEST_F(EngineRuns, PrefixReuseDoesNotMatter) {
  EngineOptions options = baseline_options();
  options.prefix_reuse = false;
  const Outcome outcome = check(options);
  EXPECT_EQ(outcome.report.prefix_hit_tokens, 0);
  EXPECT_EQ(outcome.report.prompt_tokens,
            baseline_->report.prompt_tokens + baseline_->report.prefix_hit_tokens);
}

TEST_F(EngineRuns, PreemptionDoesNotMatter) {
  const Runtime runtime({.num_threads = 1});
  Workload workload{"growing", 12, {}};
  for (std::int32_t i = 0; i < 5; ++i) workload.requests.push_back({0, 10 + 3 * i, 30, -1, 0});
  const Outcome expected = serve(runtime, *model_, workload, baseline_options());
  EXPECT_EQ(expected.report.preemptions, 0);
  for (bool reuse : {true, false}) {
    SCOPED_TRACE(reuse);
    EngineOptions options = baseline_options();
    options.prefix_reuse = reuse;
    options.block_size = 4;
    options.num_blocks = 24;  // All prompts fit; the answers need 52 in all.
    const Outcome outcome = serve(runtime, *model_, workload, options);
    EXPECT_EQ(outcome.report.finished, 5);
    EXPECT_GE(outcome.report.preemptions, 2);
    EXPECT_EQ(outcome.report.answer_tokens, 150);
    ASSERT_EQ(outcome.report.kv_groups.size(), 1u);
    EXPECT_LE(outcome.report.kv_groups[0].peak_blocks, 24);
    EXPECT_TRUE(same_outputs(expected, outcome, kWidth, 1e-4));
    EXPECT_LT(outcome.worst_error, Verifier::limit(DType::f32)) << outcome.worst_row;
  }
}

TEST_F(EngineRuns, ArrivalsDoNotMatterButAreWaitedFor) {
  Workload workload = mixed_workload();
  for (std::size_t i = 0; i < workload.requests.size(); ++i) {
    workload.requests[i].arrival_s = 0.02 * static_cast<double>((i * 7) % 12);
  }
  const Runtime runtime({.num_threads = 1});
  EngineOptions options = baseline_options();
  options.arrivals = Arrivals::real;
  const Outcome real = serve(runtime, *model_, workload, options);
  EXPECT_TRUE(same_outputs(*baseline_, real, kWidth, 1e-4));
  EXPECT_GE(real.report.wall_ms, 220);
  EXPECT_GE(real.report.time_to_first_token_ms.p50, 0);
  options.arrivals = Arrivals::x10;
  const Outcome fast = serve(runtime, *model_, workload, options);
  EXPECT_TRUE(same_outputs(*baseline_, fast, kWidth, 1e-4));
  EXPECT_GE(fast.report.wall_ms, 22);
}

TEST_F(EngineRuns, RefusesWhatCanNeverFitAndAnswersTheRest) {
  Workload workload = mixed_workload();
  workload.requests[2].answer_tokens = 0;
  workload.requests[4].prompt_tokens = 100000;
  workload.requests[5].prompt_tokens = 600;
  const Runtime runtime({.num_threads = 1});
  EngineOptions options = baseline_options();
  options.num_blocks = 20;
  const Outcome outcome = serve(runtime, *model_, workload, options);
  EXPECT_EQ(outcome.report.finished, 9);
  ASSERT_EQ(outcome.report.refused.size(), 3u);
  EXPECT_EQ(outcome.report.refused[0].request, 2);
  EXPECT_NE(outcome.report.refused[1].reason.find("the model has 640"), std::string::npos);
  EXPECT_NE(outcome.report.refused[2].reason.find("the pool has 20"), std::string::npos);
  Outcome expected = *baseline_;
  for (std::size_t i : {2u, 4u, 5u}) expected.outputs[i].clear();
  EXPECT_TRUE(same_outputs(expected, outcome, kWidth, 1e-4));
}

TEST_F(EngineRuns, StopEndsAfterTheStepAndCountsWhatIsLeft) {
  const Workload workload = mixed_workload();
  std::atomic<bool> stop = false;
  std::int64_t steps = 0;
  ServeProgress last;
  ServeHooks hooks;
  hooks.stop = &stop;
  hooks.progress = [&](const ServeProgress& progress) {
    EXPECT_GE(progress.tokens_done, last.tokens_done);
    last = progress;
    stop = ++steps == 4;
  };
  const Runtime runtime({.num_threads = 1});
  Engine engine(runtime, *model_, baseline_options());
  const ServeReport report = engine.serve(workload, hooks);
  EXPECT_EQ(report.steps, 4);
  EXPECT_GT(report.unfinished, 0);
  EXPECT_EQ(report.finished + report.unfinished, 12);
  EXPECT_EQ(last.requests_done, report.finished);
  EXPECT_EQ(last.requests, 12);

  last = {};
  stop = false;
  steps = 10;
  EXPECT_EQ(engine.serve(workload, hooks).finished, 12) << "an engine serves again";
  EXPECT_EQ(last.tokens_done, last.tokens);
}

TEST_F(EngineRuns, ServesAnEmptyWorkload) {
  const Runtime runtime({.num_threads = 1});
  Engine engine(runtime, *model_, baseline_options());
  const ServeReport report = engine.serve({"empty", 1, {}});
  EXPECT_EQ(report.finished, 0);
  EXPECT_EQ(report.steps, 0);
}

/// What the plans of a run said, against what the run reports.
class PlanReader : public StepObserver {
 public:
  PlanReader(const OpContext& ctx, const Model& model) : ctx_(ctx), model_(model) {}
  void on_layer(const LayerTrace& trace) override {
    const BatchPlan& plan = *trace.plan;
    context_rows = std::max<std::int64_t>(context_rows, plan.peak_context_rows);
    workspace_bytes = std::max(
        workspace_bytes,
        std::get<MlaLayer>(model_.layer(trace.layer).attention).workspace_bytes(ctx_, plan));
    for (std::size_t i = 0; i < trace.seq_lens.size(); ++i) {
      const std::int32_t query_len = trace.query_start_loc[i + 1] - trace.query_start_loc[i];
      const std::int64_t first_position =
          trace.positions[static_cast<std::size_t>(trace.query_start_loc[i])];
      EXPECT_EQ(trace.seq_lens[i] - query_len, first_position) << "context + query = seq_len";
      EXPECT_EQ(query_len == 1, static_cast<std::int32_t>(i) < plan.split.num_decodes);
    }
    if (trace.layer == 0) plans_of_step = &plan;
    EXPECT_EQ(&plan, plans_of_step) << "layers share one plan";
  }
  std::int64_t context_rows = 0;
  std::int64_t workspace_bytes = 0;

 private:
  const OpContext& ctx_;
  const Model& model_;
  const BatchPlan* plans_of_step = nullptr;
};

TEST_F(EngineRuns, PeaksAreWhatThePlansSaid) {
  const Runtime runtime({.num_threads = 2});
  PlanReader reader(runtime, *model_);
  ServeHooks hooks;
  hooks.observers = {&reader};
  EngineOptions options = baseline_options();
  options.workspace_rows = 64;
  Engine engine(runtime, *model_, options);
  const ServeReport report = engine.serve(mixed_workload(), hooks);
  EXPECT_EQ(report.peak_context_rows, reader.context_rows);
  EXPECT_EQ(report.peak_workspace_bytes, reader.workspace_bytes);
  EXPECT_LE(report.peak_workspace_bytes, report.workspace_bytes);
  EXPECT_EQ(runtime.workspace().used(), 0);
}

/// Checks what goes into each layer: tokens first, then the sums of what came out.
class StreamReader : public StepObserver {
 public:
  explicit StreamReader(const Model& model) : model_(model) {}
  void on_layer(const LayerTrace& trace) override {
    const std::int64_t H = trace.input.shape[1];
    if (trace.layer == 0) {
      expected_.assign(static_cast<std::size_t>(trace.input.shape[0] * H), 0);
      for (std::size_t i = 0; i < trace.request_of.size(); ++i) {
        for (std::int64_t row = trace.query_start_loc[i]; row < trace.query_start_loc[i + 1];
             ++row) {
          const std::int32_t id = trace.workload->token_id(
              trace.request_of[i], trace.positions[static_cast<std::size_t>(row)],
              model_.config().vocab_size);
          token_hidden_state(trace.workload->seed, id,
                             TensorView::of(expected_.data() + row * H, {H}));
        }
      }
    }
    const auto* input = static_cast<const float*>(trace.input.data);
    const auto* output = static_cast<const float*>(trace.output.data);
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      ASSERT_FLOAT_EQ(input[i], expected_[i]) << "layer " << trace.layer << ", element " << i;
      const auto scale = static_cast<double>(model_.config().residual_scale);
      expected_[i] =
          static_cast<float>(static_cast<double>(expected_[i]) + scale * double{output[i]});
    }
    layers_seen = std::max(layers_seen, trace.layer + 1);
  }
  std::int64_t layers_seen = 0;

 private:
  const Model& model_;
  std::vector<float> expected_;  ///< [T, H]
};

TEST(EngineStream, LayersReadTokensAndThenScaledResiduals) {
  const Model model = test::make_tiny_model({.num_layers = 3, .scale_depth = 1.4});
  EXPECT_NEAR(model.config().residual_scale, 1.4 / std::sqrt(3.0), 1e-6);
  const Runtime runtime({.num_threads = 2});
  StreamReader reader(model);
  const Outcome outcome = serve(runtime, model, mixed_workload(), baseline_options(), {&reader});
  EXPECT_EQ(reader.layers_seen, 3);
  EXPECT_LT(outcome.worst_error, Verifier::limit(DType::f32)) << outcome.worst_row;
}

TEST(EngineDtypes, SmallDtypesVerifyAndDoNotDependOnBatchMates) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    SCOPED_TRACE(std::string(name_of(dtype)));
    const Model model = test::make_tiny_model({.dtype = dtype, .logit_spread = 0.7, .width = 4});
    const Runtime runtime({.num_threads = 2});
    const Outcome together = serve(runtime, model, mixed_workload(), baseline_options());
    EngineOptions options = baseline_options();
    options.max_num_seqs = 1;
    options.prefix_reuse = false;
    options.token_budget = 50;
    const Outcome alone = serve(runtime, model, mixed_workload(), options);
    EXPECT_TRUE(same_outputs(together, alone, 4 * kWidth, 2e-2));
    for (const Outcome& outcome : {together, alone}) {
      EXPECT_LT(outcome.worst_error, Verifier::limit(dtype)) << outcome.worst_row;
    }
  }
}

TEST(EngineOptionsCheck, NamesTheOptionAndWhatItMustBe) {
  const Model model = test::make_tiny_model({.num_layers = 1});
  const Runtime runtime({.num_threads = 1});
  const auto message = [&](auto&& change) {
    EngineOptions options;
    change(options);
    return test::error_of(ErrorCode::invalid_argument, [&] { Engine(runtime, model, options); });
  };
  using O = EngineOptions;
  EXPECT_EQ(message([](O& o) { o.block_size = 0; }), "block_size is 0, must be from 1 to 1048576");
  EXPECT_TRUE(test::mentions(message([](O& o) { o.num_blocks = -1; }), {"num_blocks is -1"}));
  EXPECT_TRUE(test::mentions(message([](O& o) { o.max_num_seqs = 0; }), {"max_num_seqs is 0"}));
  EXPECT_TRUE(test::mentions(message([](O& o) { o.token_budget = 0; }), {"token_budget is 0"}));
  EXPECT_EQ(message([](O& o) { o.workspace_rows = 15; }),
            "workspace_rows is 15, must be at least block_size, 16: a chunk of context is whole "
            "blocks");
  EXPECT_EQ(message([](O& o) {
              o.workspace_rows = 511;
              o.context_plan = ContextPlanKind::equal;
            }),
            "workspace_rows is 511, must be at least 512 with the equal context plan: block_size, "
            "16, for each of max_num_seqs, 32");
}

TEST(Percentiles, AreNearestRanks) {
  EXPECT_EQ(percentiles({}).p50, 0);
  const Percentiles one = percentiles({7});
  EXPECT_EQ(one.p50, 7);
  EXPECT_EQ(one.p99, 7);
  std::vector<double> hundred;
  for (int i = 100; i >= 1; --i) hundred.push_back(i);
  const Percentiles many = percentiles(hundred);
  EXPECT_EQ(many.p50, 50);
  EXPECT_EQ(many.p90, 90);
  EXPECT_EQ(many.p99, 99);
}

}  // namespace
}  // namespace fovea
