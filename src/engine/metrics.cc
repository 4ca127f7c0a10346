#include "engine/metrics.h"

#include <algorithm>
#include <cmath>

namespace fovea {

Percentiles percentiles(std::vector<double> sample) {
  if (sample.empty()) return {};
  std::sort(sample.begin(), sample.end());
  // The smallest value that at least this part of the sample does not exceed.
  const auto nearest_rank = [&](double part) {
    const double rank = std::ceil(part * static_cast<double>(sample.size()));
    return sample[static_cast<std::size_t>(std::max(rank, 1.0)) - 1];
  };
  return {nearest_rank(0.5), nearest_rank(0.9), nearest_rank(0.99)};
}

}  // namespace fovea

namespace fovea::engine {
namespace {

double projection_flops(const MlaDims& d, double tokens) {
  const auto query_inputs = static_cast<double>(d.q_lora_rank > 0 ? d.q_lora_rank : d.hidden_size);
  const auto H = static_cast<double>(d.hidden_size);
  return 2 * tokens *
         (H * static_cast<double>(d.q_lora_rank + d.latent_dim()) +
          query_inputs * static_cast<double>(d.num_heads * d.qk_head_dim()) +
          H * static_cast<double>(d.num_heads * d.v_head_dim));
}

/// kv_b_proj over latent rows; the two absorbed products of a query cost the same.
double expansion_flops(const MlaDims& d, double rows) {
  return 2 * rows *
         static_cast<double>(d.kv_lora_rank * d.num_heads * (d.qk_nope_head_dim + d.v_head_dim));
}

}  // namespace

double layer_flops(const MlaDims& d, const BatchPlan& plan) {
  double decode_pairs = 0;
  for (std::size_t i = 0; i < plan.decode.seq_lens.size(); ++i) {
    const std::int32_t queries =
        plan.decode.query_start_loc[i + 1] - plan.decode.query_start_loc[i];
    decode_pairs += static_cast<double>(queries) * plan.decode.seq_lens[i];
  }
  double prefill_pairs = 0, context_rows = 0;
  for (std::size_t i = 0; i < plan.context_lens.size(); ++i) {
    const double queries =
        plan.prefill.cu_seqlens_q[i + 1] - double{1} * plan.prefill.cu_seqlens_q[i];
    prefill_pairs += queries * (queries + 1) / 2 + queries * plan.context_lens[i];
    context_rows += plan.context_lens[i];
  }
  const auto N = static_cast<double>(d.num_heads);
  const double decode = decode_pairs * N * static_cast<double>(d.latent_dim() + d.kv_lora_rank);
  const double prefill = prefill_pairs * N * static_cast<double>(d.qk_head_dim() + d.v_head_dim);
  return projection_flops(d, plan.num_actual_tokens) +
         expansion_flops(d, plan.num_actual_tokens + context_rows) + 2 * (decode + prefill);
}

void Metrics::on_step(const BatchPlan& plan, std::span<const ScheduledRequest> step, double busy_ms,
                      std::span<const double> arrivals_s, double now_s) {
  ++counts_.steps;
  counts_.busy_ms += busy_ms;
  counts_.peak_context_rows =
      std::max<std::int64_t>(counts_.peak_context_rows, plan.peak_context_rows);
  for (std::int64_t i = 0; i < model_.num_layers(); ++i) {
    flops_ += layer_flops(std::get<MlaLayer>(model_.layer(i).attention).dims(), plan);
  }
  std::int64_t prompt_tokens = 0;
  for (const ScheduledRequest& scheduled : step) {
    // A row that yields a later answer token is a decode; a recomputed prompt ends with one too.
    prompt_tokens += scheduled.query_len - (scheduled.answer_index > 0);
    counts_.answer_tokens += scheduled.answer_index >= 0;
    counts_.finished += scheduled.finishes;
    if (scheduled.answer_index == 0) {
      const double arrival_s = arrivals_s[static_cast<std::size_t>(scheduled.request)];
      first_token_ms_.push_back((now_s - arrival_s) * 1e3);
    }
  }
  counts_.prompt_tokens += prompt_tokens;
  if (plan.split.num_prefills > 0) {
    prefill_busy_ms_ += busy_ms;
    prefill_tokens_ += prompt_tokens;
  } else {
    ++counts_.decode_steps;
    decode_step_ms_.push_back(busy_ms);
    decode_token_ms_.push_back(busy_ms / plan.num_actual_tokens);
  }
}

void Metrics::fill(ServeReport& report) const {
  report.finished = counts_.finished;
  report.steps = counts_.steps;
  report.decode_steps = counts_.decode_steps;
  report.prompt_tokens = counts_.prompt_tokens;
  report.answer_tokens = counts_.answer_tokens;
  report.busy_ms = counts_.busy_ms;
  report.peak_context_rows = counts_.peak_context_rows;
  report.decode_step_ms = percentiles(decode_step_ms_);
  report.decode_token_ms = percentiles(decode_token_ms_);
  report.time_to_first_token_ms = percentiles(first_token_ms_);
  if (prefill_busy_ms_ > 0) {
    report.prefill_tokens_per_s = static_cast<double>(prefill_tokens_) / prefill_busy_ms_ * 1e3;
  }
  if (counts_.busy_ms > 0) report.gflops_per_s = flops_ / (counts_.busy_ms * 1e6);
}

}  // namespace fovea::engine
