#include "engine/limits.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "core/check.h"

namespace fovea::engine {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
// Capacities up to a million leave every product of two within 64 bits, with room for bytes.
constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 20;
// A decode's rows share keys: beyond a kernel tile's rows more drafts save nothing.
constexpr std::int64_t kMaxDrafts = 63;

void check_option(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  FOVEA_CHECK(value >= least && value <= most, invalid_argument, "{} is {}, must be from {} to {}",
              name, value, least, most);
}

ContextPlanKind context_plan_of(const Model& model, const EngineOptions& options) {
  return options.context_plan.value_or(model.config().is_mla() ? ContextPlanKind::packed
                                                               : ContextPlanKind::paged);
}

void check_context_options(const Model& model, const EngineOptions& options) {
  const ContextPlanKind plan = context_plan_of(model, options);
  if (!model.config().is_mla()) {
    FOVEA_CHECK(plan == ContextPlanKind::paged, invalid_argument,
                "context_plan is {}, must be paged for {}: grouped-query attention reads context "
                "from its blocks",
                plan == ContextPlanKind::packed ? "packed" : "equal", model.config().model_type);
    FOVEA_CHECK(options.workspace_rows == 0, invalid_argument,
                "workspace_rows is {}, must be left out for {}: grouped-query attention gathers no "
                "context",
                options.workspace_rows, model.config().model_type);
    return;
  }
  FOVEA_CHECK(plan != ContextPlanKind::paged, invalid_argument,
              "context_plan is paged, must be packed or equal for {}: latent attention expands "
              "context chunk by chunk",
              model.config().model_type);
  if (options.workspace_rows == 0) return;
  FOVEA_CHECK(options.workspace_rows >= options.block_size, invalid_argument,
              "workspace_rows is {}, must be at least block_size, {}: a chunk of context is whole "
              "blocks",
              options.workspace_rows, options.block_size);
  const std::int64_t least = options.block_size * options.max_num_seqs;
  FOVEA_CHECK(plan == ContextPlanKind::packed || options.workspace_rows >= least, invalid_argument,
              "workspace_rows is {}, must be at least {} with the equal context plan: block_size, "
              "{}, for each of max_num_seqs, {}",
              options.workspace_rows, least, options.block_size, options.max_num_seqs);
}

/// The `count` largest values.
std::vector<std::int64_t> largest(std::vector<std::int64_t> values, std::int64_t count) {
  const auto kept = std::min<std::size_t>(values.size(), static_cast<std::size_t>(count));
  std::partial_sort(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(kept),
                    values.end(), std::greater<>());
  values.resize(kept);
  return values;
}

/// Blocks of a group for requests of `tokens`: all that they need, or fewer when num_blocks says
/// so. Behind a window what each may hold, one more for where a prompt's piece starts, and the
/// step's rows.
std::int64_t blocks_of_group(const KvGroup& group, const std::vector<std::int64_t>& tokens,
                             const EngineOptions& options, std::int64_t max_rows) {
  const std::int64_t block_size = options.block_size;
  std::int64_t all = 0, held = 0;
  for (const std::int64_t count : tokens) {
    const std::int64_t of_request = (count + block_size - 1) / block_size;
    all += of_request;
    held += std::min(of_request,
                     1 + held_blocks(group.variant, count, options.draft_tokens, block_size));
  }
  std::int64_t blocks = options.num_blocks > 0 ? options.num_blocks : all;
  if (keys_before(group.variant) >= 0) {
    blocks = std::min({blocks, all, held + (max_rows + block_size - 1) / block_size});
  }
  return blocks;
}

}  // namespace

void check_options(const Model& model, const EngineOptions& options) {
  check_option("block_size", options.block_size, 1, kMaxCapacity);
  check_option("num_blocks", options.num_blocks, 0, kMaxCount);
  check_option("max_num_seqs", options.max_num_seqs, 1, kMaxCapacity);
  check_option("token_budget", options.token_budget, 1, kMaxCount);
  check_option("workspace_rows", options.workspace_rows, 0, kMaxCount);
  check_option("draft_tokens", options.draft_tokens, 0, kMaxDrafts);
  FOVEA_CHECK(options.draft_acceptance >= 0 && options.draft_acceptance <= 1, invalid_argument,
              "draft_acceptance is {}, must be from 0 to 1", options.draft_acceptance);
  check_context_options(model, options);
  FOVEA_CHECK(
      model.config().is_mla() || options.kv_format != "fp8_ds_mla", invalid_argument,
      "kv_format is fp8_ds_mla, must be another one for {}: it is a row of latent attention",
      model.config().model_type);
}

StepLimits find_limits(const Workload& workload, const EngineOptions& options, const Model& model,
                       const std::vector<KvGroup>& groups) {
  const std::int64_t positions = max_position(model);
  std::vector<std::int64_t> tokens;
  for (const RequestSpec& spec : workload.requests) {
    const bool valid = spec.prompt_tokens >= 1 && spec.answer_tokens >= 1;
    if (valid && spec.computed_tokens() <= positions) tokens.push_back(spec.computed_tokens());
  }
  tokens = largest(std::move(tokens), options.max_num_seqs);
  StepLimits limits;
  limits.block_size = options.block_size;
  limits.context_plan = context_plan_of(model, options);
  limits.draft_tokens = options.draft_tokens;
  limits.kv_format = options.kv_format;
  limits.max_num_seqs = std::max<std::int64_t>(1, std::ssize(tokens));
  limits.max_seq_len = tokens.empty() ? 1 : tokens.front();
  limits.max_rows = std::clamp<std::int64_t>(
      std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}), 1, options.token_budget);
  for (const KvGroup& group : groups) {
    limits.num_blocks.push_back(blocks_of_group(group, tokens, options, limits.max_rows));
  }
  if (limits.context_plan == ContextPlanKind::paged) return limits;
  limits.workspace_rows = options.workspace_rows > 0
                              ? options.workspace_rows
                              : workspace_rows({.max_model_len = limits.max_seq_len,
                                                .max_num_seqs = limits.max_num_seqs,
                                                .block_size = options.block_size});
  return limits;
}

}  // namespace fovea::engine
