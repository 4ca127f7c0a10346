#include "run_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "table.h"

namespace fovea::cli {
namespace {

/// The rest of a list that is longer is counted, not printed.
constexpr std::size_t kRefusalsShown = 10;

std::vector<std::string> percentile_row(const char* label, const Percentiles& percentiles) {
  return {label, format_number(percentiles.p50), format_number(percentiles.p90),
          format_number(percentiles.p99)};
}

nlohmann::ordered_json percentile_json(const Percentiles& percentiles) {
  return {{"p50", percentiles.p50}, {"p90", percentiles.p90}, {"p99", percentiles.p99}};
}

std::string refused_text(const std::vector<RefusedRequest>& refused) {
  std::string text;
  for (std::size_t i = 0; i < std::min(refused.size(), kRefusalsShown); ++i) {
    text += fmt::format("  request {} refused: {}\n", refused[i].request, refused[i].reason);
  }
  if (refused.size() > kRefusalsShown) {
    text += fmt::format("  and {} more\n", refused.size() - kRefusalsShown);
  }
  return text;
}

const CompareResult* find(const std::vector<CompareResult>& results, const char* method,
                          std::int64_t context) {
  for (const CompareResult& result : results) {
    if (result.method == method && result.context == context) return &result;
  }
  return nullptr;
}

/// "6.2 times faster than", and "0.8 times as fast as" for who lost.
std::string speed_ratio(double ratio) {
  return ratio >= 1 ? fmt::format("{:.1f} times faster than", ratio)
                    : fmt::format("{:.2f} times as fast as", ratio);
}

/// Which keys the layers of a group see.
std::string sight_text(const AttentionVariant& variant) {
  std::string text;
  if (variant.window_left >= 0) text = fmt::format("window of {}", variant.window_left + 1);
  if (variant.attention_chunk > 0) {
    text += fmt::format("{}chunks of {}", text.empty() ? "" : " in ", variant.attention_chunk);
  }
  return text.empty() ? "all keys" : text;
}

std::string blocks_text(const KvGroupReport& group) {
  const auto bytes = [&](std::int64_t blocks) {
    return format_bytes(static_cast<double>(blocks * group.block_bytes));
  };
  std::string text = fmt::format("{} layers, {}: {} of {} at the peak, {} of {}", group.num_layers,
                                 sight_text(group.variant), group.peak_blocks, group.num_blocks,
                                 bytes(group.peak_blocks), bytes(group.num_blocks));
  if (group.freed_blocks > 0) {
    text += fmt::format("; {}, {}, if none were freed before its request ends",
                        group.peak_blocks_unfreed, bytes(group.peak_blocks_unfreed));
  }
  return text;
}

nlohmann::ordered_json group_json(const KvGroupReport& group) {
  return {{"layers", group.num_layers},
          {"window_left", group.variant.window_left},
          {"attention_chunk", group.variant.attention_chunk},
          {"blocks", group.num_blocks},
          {"peak_blocks", group.peak_blocks},
          {"peak_blocks_unfreed", group.peak_blocks_unfreed},
          {"freed_blocks", group.freed_blocks},
          {"block_bytes", group.block_bytes},
          {"bytes", group.num_blocks * group.block_bytes},
          {"peak_bytes", group.peak_blocks * group.block_bytes}};
}

/// Of the time of all steps, what is in ops and in products with weights.
double kernel_fraction(const ServeReport& report) {
  return report.step_ms > 0 ? report.kernel_ms / report.step_ms : 0;
}

}  // namespace

std::string serve_text(const ServeReport& report) {
  Table times({"attention time in ms", "p50", "p90", "p99"});
  times.add(percentile_row("decode step", report.decode_step_ms));
  times.add(percentile_row("decode, per token", report.decode_token_ms));
  times.add(percentile_row("time to first token", report.time_to_first_token_ms));

  Facts facts;
  std::string requests =
      fmt::format("{} finished, {} refused", report.finished, report.refused.size());
  if (report.unfinished > 0) requests += fmt::format(", {} unfinished", report.unfinished);
  facts.add("requests", requests);
  facts.add("tokens", fmt::format("{} of prompts, {} of answers, in {} steps ({} of decodes only)",
                                  report.prompt_tokens, report.answer_tokens, report.steps,
                                  report.decode_steps));
  facts.add("prefill", format_number(report.prefill_tokens_per_s) + " tokens/s");
  facts.add("work", format_number(report.gflops_per_s) + " GFLOP/s");
  facts.add("time",
            fmt::format("{} s in attention, {} s in all", format_number(report.busy_ms / 1e3),
                        format_number(report.wall_ms / 1e3)));
  if (report.kernel_ms > 0) {
    facts.add("kernels", fmt::format("{:.0f} % of the steps' time", 100 * kernel_fraction(report)));
  }
  if (report.drafted_tokens > 0) {
    facts.add("drafts", fmt::format("{} tokens, {} accepted, {} answer tokens per decode",
                                    report.drafted_tokens, report.accepted_tokens,
                                    format_number(report.tokens_per_decode)));
  }
  for (const KvGroupReport& group : report.kv_groups) facts.add("blocks", blocks_text(group));
  facts.add("prefix hits", fmt::format("{} tokens", report.prefix_hit_tokens));
  facts.add("preemptions", fmt::format("{}", report.preemptions));
  facts.add("cache", format_bytes(static_cast<double>(report.cache_bytes)));
  facts.add("workspace", fmt::format("{} of {} at the peak, {} context rows at most",
                                     format_bytes(static_cast<double>(report.peak_workspace_bytes)),
                                     format_bytes(static_cast<double>(report.workspace_bytes)),
                                     report.peak_context_rows));
  return times.to_text() + "\n" + facts.to_text() + refused_text(report.refused);
}

nlohmann::ordered_json serve_json(const ServeReport& report) {
  nlohmann::ordered_json refusals = nlohmann::ordered_json::array();
  for (const RefusedRequest& refused : report.refused) {
    refusals.push_back({{"request", refused.request}, {"reason", refused.reason}});
  }
  nlohmann::ordered_json json;
  json["requests"] = {{"finished", report.finished},
                      {"refused", report.refused.size()},
                      {"unfinished", report.unfinished},
                      {"refusals", refusals}};
  json["tokens"] = {{"prompt", report.prompt_tokens}, {"answer", report.answer_tokens}};
  json["steps"] = {{"all", report.steps}, {"decode", report.decode_steps}};
  json["drafts"] = {{"drafted", report.drafted_tokens},
                    {"accepted", report.accepted_tokens},
                    {"tokens_per_decode", report.tokens_per_decode}};
  json["decode"] = {{"step_ms", percentile_json(report.decode_step_ms)},
                    {"token_ms", percentile_json(report.decode_token_ms)}};
  json["time_to_first_token_ms"] = percentile_json(report.time_to_first_token_ms);
  json["prefill"] = {{"tokens_per_s", report.prefill_tokens_per_s}};
  json["gflops_per_s"] = report.gflops_per_s;
  json["busy_ms"] = report.busy_ms;
  json["wall_ms"] = report.wall_ms;
  json["profile"] = {{"step_ms", report.step_ms}};
  if (report.kernel_ms > 0) {
    json["profile"]["kernel_ms"] = report.kernel_ms;
    json["profile"]["kernel_fraction"] = kernel_fraction(report);
  }
  json["kv_groups"] = nlohmann::ordered_json::array();
  for (const KvGroupReport& group : report.kv_groups) {
    json["kv_groups"].push_back(group_json(group));
  }
  json["prefix_hit_tokens"] = report.prefix_hit_tokens;
  json["preemptions"] = report.preemptions;
  json["cache_bytes"] = report.cache_bytes;
  json["workspace"] = {{"bytes", report.workspace_bytes},
                       {"peak_bytes", report.peak_workspace_bytes},
                       {"peak_context_rows", report.peak_context_rows}};
  return json;
}

std::string verify_text(const VerifyReport& report) {
  if (report.rows == 0) return "NOT VERIFIED: no row was served that could be checked\n";
  std::string text =
      fmt::format("{}: {} rows against float64, worst error {} of the row's norm, limit {}\n",
                  report.passed() ? "verified" : "VERIFICATION FAILED", report.rows,
                  format_number(report.worst_relative_error), format_number(report.limit));
  if (!report.worst_row.empty()) text += fmt::format("  worst: {}\n", report.worst_row);
  return text;
}

nlohmann::ordered_json verify_json(const VerifyReport& report) {
  return {{"rows", report.rows},
          {"worst_relative_error", report.worst_relative_error},
          {"limit", report.limit},
          {"worst_row", report.worst_row},
          {"passed", report.passed()}};
}

std::string compare_text(const std::vector<CompareResult>& results) {
  Table table({"method", "context", "cache", "ms per step", "worst error"});
  std::int64_t longest = 0;
  for (const CompareResult& result : results) {
    table.add({result.method, std::to_string(result.context),
               format_bytes(static_cast<double>(result.cache_bytes)), format_number(result.step_ms),
               format_number(result.worst_error)});
    longest = std::max(longest, result.context);
  }
  const std::string text = table.to_text();
  const CompareResult* ours = find(results, "fovea", longest);
  const CompareResult* expanded = find(results, "expanded_cache", longest);
  const CompareResult* expanding = find(results, "expand_every_step", longest);
  if (ours == nullptr || expanded == nullptr || expanding == nullptr) return text;
  return text +
         fmt::format(
             "At {} tokens of context the latent cache is {:.1f} times smaller than expanded "
             "keys and values,\nand a step is {} expanding the latent cache every step and "
             "{} reading expanded keys and values.\n",
             longest,
             static_cast<double>(expanded->cache_bytes) / static_cast<double>(ours->cache_bytes),
             speed_ratio(expanding->step_ms / ours->step_ms),
             speed_ratio(expanded->step_ms / ours->step_ms));
}

nlohmann::ordered_json compare_json(const std::vector<CompareResult>& results) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const CompareResult& result : results) {
    json.push_back({{"method", result.method},
                    {"context", result.context},
                    {"cache_bytes", result.cache_bytes},
                    {"step_ms", result.step_ms},
                    {"worst_error", result.worst_error}});
  }
  return json;
}

}  // namespace fovea::cli
