#include "engine/metrics.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/tiny_model.h"

namespace fovea::engine {
namespace {

BatchPlan plan_of(std::vector<std::int32_t> query_lens, std::vector<std::int32_t> seq_lens) {
  SequenceBatch batch;
  batch.query_start_loc = {0};
  for (std::int32_t len : query_lens) {
    batch.query_start_loc.push_back(batch.query_start_loc.back() + len);
  }
  batch.seq_lens = std::move(seq_lens);
  return make_plan(batch, {}, {});
}

TEST(LayerFlops, CountsProjectionsExpansionAndVisiblePairs) {
  MlaDims d;
  d.hidden_size = 5, d.num_heads = 2, d.q_lora_rank = 3, d.kv_lora_rank = 4;
  d.qk_nope_head_dim = 6, d.qk_rope_head_dim = 2, d.v_head_dim = 7;
  // A decode with 9 keys; prefills of 3 tokens without context, and of 2 with 5.
  const BatchPlan plan = plan_of({1, 3, 2}, {9, 3, 7});
  const double weights = 5 * 3 + 3 * 2 * 8 + 5 * 6 + 2 * 7 * 5;  // q_a, q_b, kv_a, o.
  const double kv_b = 4 * 2 * (6 + 7);
  double decode = 0, prefill = 0;
  decode += 9 * 2 * (6 + 4);  // Scores over L + R, values over L.
  for (int keys : {1, 2, 3, 6, 7}) prefill += keys * 2 * (8 + 7);
  // Every new row passes kv_b_proj or its absorbed halves, and the five context rows are expanded.
  EXPECT_DOUBLE_EQ(layer_flops(d, plan), 2 * (6 * weights + (6 + 5) * kv_b + decode + prefill));
  d.q_lora_rank = 0;
  EXPECT_DOUBLE_EQ(layer_flops(d, plan),
                   2 * (6 * (5 * 16 + 5 * 6 + 14 * 5) + 11 * kv_b + decode + prefill));
}

TEST(Metrics, TellsDecodeStepsFromStepsWithPrompts) {
  const Model model = test::make_tiny_model({.num_layers = 1});
  const std::vector<double> arrivals{0.5, 0};
  Metrics metrics(model, kv_groups(model));
  const auto on_step = [&](const BatchPlan& plan, std::vector<ScheduledRequest> step, double ms,
                           double now_s) {
    const BatchPlan* plans[] = {&plan};
    metrics.on_step(plans, step, {.busy_ms = ms, .step_ms = ms + 1, .kernel_ms = ms / 2}, arrivals,
                    now_s);
  };
  const auto scheduled = [](std::int64_t request, std::int32_t query_len, std::int64_t answer,
                            bool finishes) {
    ScheduledRequest result;
    result.request = request;
    result.query_len = query_len;
    result.answer_index = answer;
    result.finishes = finishes;
    return result;
  };
  // Request 1's prompt of 10; then its second answer token beside the first piece of request 0's.
  on_step(plan_of({10}, {10}), {scheduled(1, 10, 0, false)}, 20, 1);
  on_step(plan_of({1, 4}, {11, 4}), {scheduled(1, 1, 1, false), scheduled(0, 4, -1, false)}, 5, 2);
  on_step(plan_of({1, 1}, {12, 5}), {scheduled(1, 1, 2, true), scheduled(0, 1, 0, true)}, 6, 3);
  ServeReport report;
  metrics.fill(report);
  EXPECT_EQ(report.steps, 3);
  EXPECT_EQ(report.decode_steps, 1);
  EXPECT_EQ(report.finished, 2);
  EXPECT_EQ(report.prompt_tokens, 15);
  EXPECT_EQ(report.answer_tokens, 4);
  EXPECT_EQ(report.busy_ms, 31);
  EXPECT_EQ(report.step_ms, 34);
  EXPECT_EQ(report.kernel_ms, 15.5);
  EXPECT_EQ(report.decode_step_ms.p50, 6);
  EXPECT_EQ(report.decode_token_ms.p50, 3);
  EXPECT_EQ(report.time_to_first_token_ms.p50, 1000);
  EXPECT_EQ(report.time_to_first_token_ms.p99, 2500);
  EXPECT_DOUBLE_EQ(report.prefill_tokens_per_s, 14 / 25e-3);
  EXPECT_GT(report.gflops_per_s, 0);
}

TEST(LayerFlops, CountsWhatAWindowShows) {
  GqaDims d;
  d.hidden_size = 5, d.num_heads = 4, d.num_kv_heads = 2, d.head_dim = 3, d.v_head_dim = 2;
  SequenceBatch batch;
  batch.query_start_loc = {0, 1, 4};
  batch.seq_lens = {9, 5};
  PlanOptions options;
  options.context_plan = ContextPlanKind::paged;
  options.variant.window_left = 2;
  const double weights = 5 * (4 * 3 + 2 * 3 + 2 * 2) + 4 * 2 * 5;
  const double pairs = 3 + 3 + 3 + 3;  // Each query sees itself and two before it.
  EXPECT_DOUBLE_EQ(layer_flops(d, make_plan(batch, {}, options)),
                   2 * (4 * weights + pairs * 4 * (3 + 2)));
}

TEST(Metrics, CountsDraftsAndWhatTheyYield) {
  const Model model = test::make_tiny_model({.num_layers = 1});
  Metrics metrics(model, kv_groups(model));
  ScheduledRequest scheduled;
  scheduled.query_len = 5;
  scheduled.num_drafts = 4;
  scheduled.num_accepted = 2;
  scheduled.answer_index = 7;
  SequenceBatch batch;
  batch.query_start_loc = {0, 5};
  batch.seq_lens = {30};
  PlanOptions options;
  options.split = {.reorder_batch_threshold = 5, .support = QueryLenSupport::varlen};
  const BatchPlan plan = make_plan(batch, {}, options);
  const BatchPlan* plans[] = {&plan};
  metrics.on_step(plans, std::span(&scheduled, 1), {.busy_ms = 6}, std::vector<double>{0}, 1);
  ServeReport report;
  metrics.fill(report);
  EXPECT_EQ(report.prompt_tokens, 0);
  EXPECT_EQ(report.answer_tokens, 3);
  EXPECT_EQ(report.drafted_tokens, 4);
  EXPECT_EQ(report.accepted_tokens, 2);
  EXPECT_EQ(report.tokens_per_decode, 3);
  EXPECT_EQ(report.decode_token_ms.p50, 2);
}

}  // namespace
}  // namespace fovea::engine
