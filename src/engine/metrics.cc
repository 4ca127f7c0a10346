#include "engine/metrics.h"

#include <algorithm>
#include <cmath>

#include "variants/visibility.h"

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

/// (query, key) pairs that see each other, and context rows that prefills see.
struct VisibleWork {
  double decode_pairs = 0;
  double prefill_pairs = 0;
  double context_rows = 0;
};

double visible_pairs(const AttentionVariant& variant, const SequenceExtent& extent) {
  std::int64_t pairs = 0;
  for (std::int64_t query = 0; query < extent.num_queries; ++query) {
    pairs += visible_keys(variant, query, extent).size();
  }
  return static_cast<double>(pairs);
}

VisibleWork visible_work(const BatchPlan& plan) {
  VisibleWork work;
  for (std::size_t i = 0; i < plan.decode.seq_lens.size(); ++i) {
    const std::int32_t queries =
        plan.decode.query_start_loc[i + 1] - plan.decode.query_start_loc[i];
    work.decode_pairs += visible_pairs(plan.variant, {queries, plan.decode.seq_lens[i]});
  }
  for (std::size_t i = 0; i < plan.context_lens.size(); ++i) {
    const std::int32_t queries = plan.prefill.cu_seqlens_q[i + 1] - plan.prefill.cu_seqlens_q[i];
    const std::int64_t context = plan.context_lens[i];
    const SequenceExtent extent{queries, context + queries};
    work.prefill_pairs += visible_pairs(plan.variant, extent);
    if (queries == 0) continue;
    const KeyInterval seen = visible_to_any(plan.variant, {0, queries}, extent);
    work.context_rows += static_cast<double>(intersect(seen, {0, context}).size());
  }
  return work;
}

}  // namespace

double layer_flops(const MlaDims& d, const BatchPlan& plan) {
  const VisibleWork work = visible_work(plan);
  const auto N = static_cast<double>(d.num_heads);
  const double decode =
      work.decode_pairs * N * static_cast<double>(d.latent_dim() + d.kv_lora_rank);
  const double prefill =
      work.prefill_pairs * N * static_cast<double>(d.qk_head_dim() + d.v_head_dim);
  return projection_flops(d, plan.num_actual_tokens) +
         expansion_flops(d, plan.num_actual_tokens + work.context_rows) + 2 * (decode + prefill);
}

double layer_flops(const GqaDims& d, const BatchPlan& plan) {
  const VisibleWork work = visible_work(plan);
  const double projections = static_cast<double>(d.hidden_size * (d.qkv_size() + d.out_size()));
  const double pair = static_cast<double>(d.num_heads * (d.head_dim + d.v_head_dim));
  return 2 *
         (plan.num_actual_tokens * projections + (work.decode_pairs + work.prefill_pairs) * pair);
}

void Metrics::on_step(std::span<const BatchPlan* const> plans,
                      std::span<const ScheduledRequest> step, const StepRunner::Times& times,
                      std::span<const double> arrivals_s, double now_s) {
  ++counts_.steps;
  const double busy_ms = times.busy_ms;
  counts_.busy_ms += busy_ms;
  counts_.step_ms += times.step_ms;
  counts_.kernel_ms += times.kernel_ms;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    counts_.peak_context_rows =
        std::max<std::int64_t>(counts_.peak_context_rows, plans[g]->peak_context_rows);
    for (const std::int64_t layer : groups_[g].layers) {
      flops_ += std::visit(
          [&](const auto& attention) { return layer_flops(attention.dims(), *plans[g]); },
          model_.layer(layer).attention);
    }
  }
  const std::int64_t prompt_before = counts_.prompt_tokens;
  const std::int64_t answers_before = counts_.answer_tokens;
  count_tokens(step, arrivals_s, now_s);
  if (plans[0]->split.num_prefills > 0) {
    prefill_busy_ms_ += busy_ms;
    prefill_tokens_ += counts_.prompt_tokens - prompt_before;
    return;
  }
  ++counts_.decode_steps;
  decode_step_ms_.push_back(busy_ms);
  const std::int64_t answers = counts_.answer_tokens - answers_before;
  if (answers > 0) decode_token_ms_.push_back(busy_ms / static_cast<double>(answers));
}

void Metrics::count_tokens(std::span<const ScheduledRequest> step,
                           std::span<const double> arrivals_s, double now_s) {
  for (const ScheduledRequest& scheduled : step) {
    // A row that yields a later answer token is a decode; a recomputed prompt ends with one too.
    const bool is_decode = scheduled.answer_index > 0;
    counts_.prompt_tokens += scheduled.query_len - scheduled.num_drafts - (is_decode ? 1 : 0);
    counts_.answer_tokens += scheduled.num_answers();
    counts_.drafted_tokens += scheduled.num_drafts;
    counts_.accepted_tokens += scheduled.num_accepted;
    counts_.finished += scheduled.finishes;
    if (is_decode) {
      ++decodes_;
      decoded_tokens_ += scheduled.num_answers();
    }
    if (scheduled.answer_index == 0) {
      const double arrival_s = arrivals_s[static_cast<std::size_t>(scheduled.request)];
      first_token_ms_.push_back((now_s - arrival_s) * 1e3);
    }
  }
}

void Metrics::fill(ServeReport& report) const {
  report.finished = counts_.finished;
  report.steps = counts_.steps;
  report.decode_steps = counts_.decode_steps;
  report.prompt_tokens = counts_.prompt_tokens;
  report.answer_tokens = counts_.answer_tokens;
  report.drafted_tokens = counts_.drafted_tokens;
  report.accepted_tokens = counts_.accepted_tokens;
  if (decodes_ > 0) {
    report.tokens_per_decode = static_cast<double>(decoded_tokens_) / static_cast<double>(decodes_);
  }
  report.busy_ms = counts_.busy_ms;
  report.step_ms = counts_.step_ms;
  report.kernel_ms = counts_.kernel_ms;
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
