// fovea plan: what a batch becomes.
#include "fovea/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "commands.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

/// Of a sequence and of a batch.
constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

struct PlanArgs {
  std::vector<std::int64_t> query_lens;
  std::vector<std::int64_t> context_lens;
  std::string batch_file;
  std::int64_t workspace_rows = 0;  // 0: PlanOptions' own.
  std::int64_t block_size = PlanOptions{}.block_size;
  std::string context_plan = "packed";
  std::int64_t window_left = -1;
  std::int64_t attention_chunk = 0;
  std::int64_t threshold = 1;
  std::string query_len_support = "single_only";
  // 0: what this machine's runtime plans with.
  std::int64_t num_workers = 0;
  std::int64_t kv_tile = 0;
  std::int64_t query_tile = 0;
  bool as_json = false;
};

template <class... Args>
[[noreturn]] void refuse_batch(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(ErrorCode::corrupt_file, fmt::format(text, std::forward<Args>(args)...));
}

nlohmann::json parse_batch_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) refuse_batch("{}: cannot be read: {}", path, std::strerror(errno));
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(file);
  } catch (const nlohmann::json::parse_error& error) {
    refuse_batch("{}: is not JSON from byte {} on", path, error.byte);
  } catch (const nlohmann::json::exception&) {
    refuse_batch("{}: has a number that is out of range", path);
  }
  if (!json.is_object()) {
    refuse_batch("{}: was {}, must be an object with query_lens and context_lens", path,
                 json.type_name());
  }
  return json;
}

std::vector<std::int64_t> lengths_of(const std::string& path, const nlohmann::json& json,
                                     const char* key) {
  const auto list = json.find(key);
  if (list == json.end()) {
    refuse_batch("{}: {} is missing, must be a length per request", path, key);
  }
  if (!list->is_array()) {
    refuse_batch("{}: {} was {}, must be an array of lengths", path, key, list->dump());
  }
  std::vector<std::int64_t> lengths;
  for (const nlohmann::json& length : *list) {
    // Non-negative integers are parsed as unsigned, all others are no lengths.
    if (!length.is_number_unsigned() || length.get<std::uint64_t>() > kMaxTokens) {
      refuse_batch("{}: {}[{}] was {}, must be an integer from 0 to {}", path, key, lengths.size(),
                   length.dump(), kMaxTokens);
    }
    lengths.push_back(length.get<std::int64_t>());
  }
  return lengths;
}

/// {"query_lens": [...], "context_lens": [...]}
void read_batch_file(PlanArgs& args) {
  const nlohmann::json json = parse_batch_file(args.batch_file);
  for (const auto& [key, value] : json.items()) {
    if (key != "query_lens" && key != "context_lens") {
      refuse_batch("{}: has '{}', must have query_lens and context_lens alone", args.batch_file,
                   key);
    }
  }
  args.query_lens = lengths_of(args.batch_file, json, "query_lens");
  args.context_lens = lengths_of(args.batch_file, json, "context_lens");
}

void check_lengths(const PlanArgs& args) {
  const bool is_file = !args.batch_file.empty();
  const ErrorCode code = is_file ? ErrorCode::corrupt_file : ErrorCode::invalid_argument;
  const std::string query_name = is_file ? args.batch_file + ": query_lens" : "--query-lens";
  const std::string context_name = is_file ? args.batch_file + ": context_lens" : "--context-lens";
  if (args.query_lens.empty()) {
    throw Error(code, query_name + ": was empty, must be one length per request");
  }
  if (args.context_lens.size() != args.query_lens.size()) {
    throw Error(code, fmt::format("{}: has {} lengths, must be one for each of the {} {}",
                                  context_name, args.context_lens.size(), args.query_lens.size(),
                                  is_file ? "query_lens" : "--query-lens"));
  }
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < args.query_lens.size(); ++i) {
    const std::int64_t query_len = args.query_lens[i];
    const std::int64_t context_len = args.context_lens[i];
    tokens += query_len;
    if (query_len < 0 || context_len < 0 || query_len + context_len > kMaxTokens ||
        tokens > kMaxTokens) {
      throw Error(code, fmt::format("{}, {}: request {} has {} and {} tokens, must be at least 0, "
                                    "and at most {} as a sequence and as a batch",
                                    query_name, is_file ? "context_lens" : context_name, i,
                                    query_len, context_len, kMaxTokens));
    }
  }
}

PlanTarget target_of(const PlanArgs& args) {
  PlanTarget target = Runtime().context().plan_target;
  if (args.num_workers > 0) target.num_workers = static_cast<std::int32_t>(args.num_workers);
  if (args.kv_tile > 0) target.decode_kv_tile = static_cast<std::int32_t>(args.kv_tile);
  if (args.query_tile > 0) target.prefill_query_tile = static_cast<std::int32_t>(args.query_tile);
  return target;
}

QueryLenSupport parse_support(const std::string& name) {
  if (name == "uniform") return QueryLenSupport::uniform;
  return name == "varlen" ? QueryLenSupport::varlen : QueryLenSupport::single_only;
}

SequenceBatch to_batch(const std::vector<std::int32_t>& query_lens,
                       const std::vector<std::int32_t>& context_lens) {
  SequenceBatch batch;
  batch.query_start_loc = {0};
  for (std::size_t i = 0; i < query_lens.size(); ++i) {
    batch.query_start_loc.push_back(batch.query_start_loc.back() + query_lens[i]);
    batch.seq_lens.push_back(context_lens[i] + query_lens[i]);
  }
  return batch;
}

int plan(PlanArgs args) {
  if (!args.batch_file.empty()) read_batch_file(args);
  check_lengths(args);
  PlanOptions options;
  options.split.reorder_batch_threshold = static_cast<std::int32_t>(args.threshold);
  options.split.support = parse_support(args.query_len_support);
  options.context_plan = parse_context_plan(args.context_plan);
  options.variant.window_left = args.window_left;
  options.variant.attention_chunk = args.attention_chunk;
  if (args.workspace_rows > 0) options.workspace_rows = args.workspace_rows;
  if (args.workspace_rows > 0 && options.context_plan == ContextPlanKind::paged) {
    throw Error(ErrorCode::invalid_argument,
                "--workspace-rows: was given, must be left out with --context-plan paged: nothing "
                "is gathered");
  }
  options.block_size = args.block_size;

  std::vector<std::int32_t> query_lens(args.query_lens.begin(), args.query_lens.end());
  std::vector<std::int32_t> context_lens(args.context_lens.begin(), args.context_lens.end());
  std::vector<std::int32_t> order(query_lens.size());
  std::iota(order.begin(), order.end(), 0);
  for (const auto& [a, b] : reorder_swaps(query_lens, options.split)) {
    const auto i = static_cast<std::size_t>(a);
    const auto j = static_cast<std::size_t>(b);
    std::swap(order[i], order[j]);
    std::swap(query_lens[i], query_lens[j]);
    std::swap(context_lens[i], context_lens[j]);
  }
  const BatchPlan result = make_plan(to_batch(query_lens, context_lens), target_of(args), options);
  if (args.as_json) {
    nlohmann::ordered_json json;
    json["order"] = order;
    json["plan"] = nlohmann::ordered_json::parse(result.to_json());
    fmt::print("{}\n", json.dump(2));
  } else {
    fmt::print("order of the requests: {}\n{}", fmt::join(order, " "), result.to_text());
  }
  return 0;
}

}  // namespace

ContextPlanKind parse_context_plan(const std::string& name) {
  if (name == "paged") return ContextPlanKind::paged;
  return name == "equal" ? ContextPlanKind::equal : ContextPlanKind::packed;
}

Command declare_plan(Options& options) {
  auto args = std::make_shared<PlanArgs>();
  options.integers("--query-lens", args->query_lens, "New tokens per request", {0});
  options.integers("--context-lens", args->context_lens, "Cached tokens per request", {0});
  options.input_file("--batch", args->batch_file,
                     "Both from a JSON file with query_lens and context_lens");
  options.exclude("--batch", "--query-lens");
  options.exclude("--batch", "--context-lens");
  options.integer(
      "--workspace-rows", args->workspace_rows,
      fmt::format("Context rows of a chunk (default: {})", PlanOptions{}.workspace_rows));
  options.integer("--block-size", args->block_size, "Tokens per block");
  options.word("--context-plan", args->context_plan,
               "How context is cut into chunks; paged: read from its blocks",
               {"packed", "equal", "paged"});
  options.integer("--window-left", args->window_left,
                  "Keys before itself that a query sees (default: all)", {0});
  options.integer("--attention-chunk", args->attention_chunk,
                  "A query sees keys of its own chunk of so many (default: all)");
  options.integer("--threshold", args->threshold, "Most new tokens of a decode");
  options.word("--query-len-support", args->query_len_support, "What decode kernels take",
               {"single_only", "uniform", "varlen"});
  options.integer("--workers", args->num_workers, "Threads that share the decodes", {1, 1 << 20});
  options.integer("--kv-tile", args->kv_tile, "Keys of a tile: splits are multiples", {1, 1 << 20});
  options.integer("--query-tile", args->query_tile, "Query rows of a prefill tile", {1, 1 << 20});
  options.flag("--json", args->as_json, "Print JSON");
  return [args] { return plan(*args); };
}

}  // namespace fovea::cli
