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
  Metrics metrics(model);
  const std::vector<double> arrivals{0.5, 0};
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
  metrics.on_step(plan_of({10}, {10}), std::vector{scheduled(1, 10, 0, false)}, 20, arrivals, 1);
  metrics.on_step(plan_of({1, 4}, {11, 4}),
                  std::vector{scheduled(1, 1, 1, false), scheduled(0, 4, -1, false)}, 5, arrivals,
                  2);
  metrics.on_step(plan_of({1, 1}, {12, 5}),
                  std::vector{scheduled(1, 1, 2, true), scheduled(0, 1, 0, true)}, 6, arrivals, 3);
  ServeReport report;
  metrics.fill(report);
  EXPECT_EQ(report.steps, 3);
  EXPECT_EQ(report.decode_steps, 1);
  EXPECT_EQ(report.finished, 2);
  EXPECT_EQ(report.prompt_tokens, 15);
  EXPECT_EQ(report.answer_tokens, 4);
  EXPECT_EQ(report.busy_ms, 31);
  EXPECT_EQ(report.decode_step_ms.p50, 6);
  EXPECT_EQ(report.decode_token_ms.p50, 3);
  EXPECT_EQ(report.time_to_first_token_ms.p50, 1000);
  EXPECT_EQ(report.time_to_first_token_ms.p99, 2500);
  EXPECT_DOUBLE_EQ(report.prefill_tokens_per_s, 14 / 25e-3);
  EXPECT_GT(report.gflops_per_s, 0);
}

}  // namespace
}  // namespace fovea::engine
