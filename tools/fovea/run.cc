// fovea run: serve a workload with a model's attention layers, and prove and compare it.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <memory>
#include <span>

#include "commands.h"
#include "fovea/engine.h"
#include "fovea/error.h"
#include "interrupt.h"
#include "machine_json.h"
#include "progress.h"
#include "run_report.h"
#include "table.h"

namespace fovea::cli {
namespace {

// Two slow cores serve, verify and compare this many in well under 20 seconds.
constexpr std::int64_t kGeneratedRequests = 4;
constexpr std::int64_t kVerifiedRows = 64;
constexpr std::array<std::int64_t, 2> kCompareContexts = {8192, 32768};

struct RunArgs {
  std::string model = "deepseek-v2-lite";
  std::int64_t num_layers = -1;
  std::string workload_file;
  std::int64_t num_requests = -1;
  std::int64_t seed = 0;
  std::string arrivals = "none";
  std::string dtype = "bf16";
  std::string context_plan;  // Empty: what the model's attention takes.
  std::string prefix_reuse = "on";
  EngineOptions engine;
  RuntimeArgs runtime;
  bool verify = false;
  bool compare = false;
  std::string json_file;
  std::string dump_directory;
};

void complete(RunArgs& args) {
  args.engine.arrivals = args.arrivals == "real"  ? Arrivals::real
                         : args.arrivals == "x10" ? Arrivals::x10
                                                  : Arrivals::none;
  if (!args.context_plan.empty()) args.engine.context_plan = parse_context_plan(args.context_plan);
  args.engine.prefix_reuse = args.prefix_reuse == "on";
}

Workload make_workload(const RunArgs& args) {
  const auto seed = static_cast<std::uint64_t>(args.seed);
  if (!args.workload_file.empty()) {
    return load_workload(args.workload_file, args.num_requests, seed);
  }
  return generate_workload(args.num_requests < 0 ? kGeneratedRequests : args.num_requests, seed);
}

std::string kv_format_name(const RunArgs& args, const Model& model) {
  const std::string& asked = args.engine.kv_format;
  return asked.empty() ? std::string(name_of(model.dtype())) : asked;
}

std::string context_plan_name(const RunArgs& args, const Model& model) {
  if (!args.context_plan.empty()) return args.context_plan;
  return model.config().is_mla() ? "packed" : "paged";
}

/// Every option by its name, with what its default came to.
nlohmann::ordered_json options_json(const RunArgs& args, const Runtime& runtime, const Model& model,
                                    const Workload& workload) {
  return {{"model", args.model},
          {"layers", model.num_layers()},
          {"workload", workload.name},
          {"requests", workload.requests.size()},
          {"seed", args.seed},
          {"arrivals", args.arrivals},
          {"dtype", args.dtype},
          {"block-size", args.engine.block_size},
          {"num-blocks", args.engine.num_blocks},
          {"max-num-seqs", args.engine.max_num_seqs},
          {"workspace-rows", args.engine.workspace_rows},
          {"context-plan", context_plan_name(args, model)},
          {"kv-format", kv_format_name(args, model)},
          {"prefix-reuse", args.prefix_reuse},
          {"token-budget", args.engine.token_budget},
          {"draft-tokens", args.engine.draft_tokens},
          {"acceptance", args.engine.draft_acceptance},
          {"threads", runtime.num_threads()},
          {"backend", runtime.backend()},
          {"batch-invariant", args.runtime.batch_invariant},
          {"verify", args.verify},
          {"compare", args.compare},
          {"dump", args.dump_directory}};
}

std::string dims_text(const ModelConfig& config) {
  if (!config.is_mla()) {
    const GqaDims& dims = config.gqa;
    return fmt::format("hidden {}, {} heads over {}, head_dim {}", dims.hidden_size, dims.num_heads,
                       dims.num_kv_heads, dims.head_dim);
  }
  const MlaDims& dims = config.mla;
  return fmt::format(
      "hidden {}, {} heads, q_lora_rank {}, kv_lora_rank {}, qk_nope {}, qk_rope {}, "
      "v {}",
      dims.hidden_size, dims.num_heads, dims.q_lora_rank, dims.kv_lora_rank, dims.qk_nope_head_dim,
      dims.qk_rope_head_dim, dims.v_head_dim);
}

void print_header(const RunArgs& args, const Runtime& runtime, const Model& model,
                  const Workload& workload) {
  const ModelConfig& config = model.config();
  fmt::print("fovea {}: attention without MLP; times are attention milliseconds\n", FOVEA_VERSION);
  Facts facts;
  facts.add("model", fmt::format("{} ({}), {} of {} layers in {}, {} of weights", args.model,
                                 config.model_type, model.num_layers(), config.num_layers,
                                 name_of(model.dtype()),
                                 format_bytes(static_cast<double>(model.weight_bytes()))));
  facts.add("dims", dims_text(config));
  facts.add("machine", fmt::format("{}, {} threads, backend {}, isa {}", processor_name(),
                                   runtime.num_threads(), runtime.backend(), runtime.isa()));
  if (!runtime.device_name().empty()) facts.add("device", std::string(runtime.device_name()));
  facts.add("workload", fmt::format("{}, {} requests, arrivals {}", workload.name,
                                    workload.requests.size(), args.arrivals));
  fmt::print("{}\n", facts.to_text());
  std::fflush(stdout);
}

ServeReport serve(const RunArgs& args, Engine& engine, const Model& model, const Workload& workload,
                  Verifier* verifier) {
  std::unique_ptr<Dumper> dumper;
  Progress progress;
  ServeHooks hooks;
  if (verifier != nullptr) hooks.observers.push_back(verifier);
  if (!args.dump_directory.empty()) {
    dumper = std::make_unique<Dumper>(model, workload, args.dump_directory);
    hooks.observers.push_back(dumper.get());
  }
  hooks.progress = [&progress](const ServeProgress& now) { progress.update(now); };
  hooks.stop = &InterruptGuard::requested();
  return engine.serve(workload, hooks);
}

/// Those that the model has positions for, else the largest power of two that it has.
std::vector<std::int64_t> contexts_to_compare(const Model& model) {
  if (!model.config().is_mla()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--compare: {} has grouped-query attention, must be left out: what it "
                            "compares is a latent cache with expanded keys and values",
                            model.config().model_type));
  }
  const auto max_position = static_cast<std::uint64_t>(
      std::min(model.config().max_position, model.config().groups[0].rope.max_position));
  std::vector<std::int64_t> contexts;
  for (const std::int64_t context : kCompareContexts) {
    if (static_cast<std::uint64_t>(context) <= max_position) contexts.push_back(context);
  }
  if (contexts.empty()) contexts.push_back(static_cast<std::int64_t>(std::bit_floor(max_position)));
  if (contexts.size() < kCompareContexts.size()) {
    fmt::print("comparing at {} tokens of context alone: the model has {} positions\n\n",
               contexts.front(), max_position);
  }
  return contexts;
}

/// One context after the other, so that Ctrl-C ends between them.
std::vector<CompareResult> compare(const Runtime& runtime, const Model& model,
                                   const std::vector<std::int64_t>& contexts) {
  std::vector<CompareResult> results;
  for (const std::int64_t& context : contexts) {
    if (InterruptGuard::requested()) break;
    fmt::print(stderr, "comparing at {} tokens of context ...\n", context);
    for (CompareResult& result : compare_methods(runtime, model, std::span(&context, 1))) {
      results.push_back(std::move(result));
    }
  }
  return results;
}

/// What an earlier run left would pass for this one's.
void check_dump_directory(const std::string& directory) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("request-") && name.ends_with(".safetensors")) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--dump: '{}' has {} of an earlier run, must be a directory without "
                              "request-*.safetensors",
                              directory, name));
    }
  }
}

VerifyReport report_of(const Verifier& verifier, const Model& model) {
  return {.rows = verifier.rows(),
          .worst_relative_error = verifier.worst_relative_error(),
          .limit = Verifier::limit(model.dtype()),
          .worst_row = verifier.worst_row()};
}

/// Into `json`; what goes wrong too, so that what was served before is reported.
int report_comparison(const Runtime& runtime, const Model& model,
                      const std::vector<std::int64_t>& contexts, nlohmann::ordered_json& json) {
  try {
    const std::vector<CompareResult> results = compare(runtime, model, contexts);
    json["compare"] = compare_json(results);
    fmt::print("one layer, one request, one new token\n{}", compare_text(results));
    return 0;
  } catch (const std::exception& error) {
    json["compare_error"] = error.what();
    fmt::print(stderr, "fovea: error: --compare: {}\n", error.what());
    return kExitFailure;
  }
}

int run(RunArgs args) {
  complete(args);
  if (!args.dump_directory.empty()) check_dump_directory(args.dump_directory);
  const JsonFile json_file(args.json_file);
  const ToolRuntime runtime(args.runtime);
  if (args.compare && runtime->backend() == "cuda") {
    throw Error(ErrorCode::invalid_argument,
                "--compare: the backend is cuda, must be cpu: what it compares with is the CPU's");
  }
  const Workload workload = make_workload(args);
  const Model model = Model::load(args.model, {.num_layers = args.num_layers,
                                               .dtype = parse_dtype(args.dtype),
                                               .seed = static_cast<std::uint64_t>(args.seed),
                                               .memory = runtime->context().memory});
  std::vector<std::int64_t> contexts;
  if (args.compare) contexts = contexts_to_compare(model);
  Engine engine(*runtime, model, args.engine);  // Refuses bad options before any output.
  print_header(args, *runtime, model, workload);

  const InterruptGuard guard;
  nlohmann::ordered_json json = describe_machine(*runtime);
  json["options"] = options_json(args, *runtime, model, workload);
  int exit_code = 0;
  std::unique_ptr<Verifier> verifier;
  if (args.verify)
    verifier =
        std::make_unique<Verifier>(model, kVerifiedRows, static_cast<std::uint64_t>(args.seed));
  const ServeReport report = serve(args, engine, model, workload, verifier.get());
  json.update(serve_json(report));
  fmt::print("{}\n", serve_text(report));
  const bool is_refused = report.finished == 0 && !workload.requests.empty();
  if (is_refused && !InterruptGuard::requested()) exit_code = kExitFailure;

  if (verifier != nullptr) {
    const VerifyReport verified = report_of(*verifier, model);
    json["verify"] = verify_json(verified);
    fmt::print("{}\n", verify_text(verified));
    const bool is_too_early = verified.rows == 0 && InterruptGuard::requested();
    if (!verified.passed() && !is_too_early) exit_code = kExitFailure;
  }
  std::fflush(stdout);
  if (args.compare && !InterruptGuard::requested()) {
    exit_code = std::max(exit_code, report_comparison(*runtime, model, contexts, json));
  }
  if (InterruptGuard::requested()) {
    fmt::print("interrupted: this is what was served until then\n");
    exit_code = exit_code == 0 ? kExitInterrupted : exit_code;
  }
  json["interrupted"] = InterruptGuard::requested().load();
  json_file.write(json);
  return exit_code;
}

void add_workload_options(Options& options, RunArgs& args) {
  options.text("--model", args.model, "A preset (see fovea info) or a Hugging Face directory",
               "NAME|DIR");
  options.integer("--layers", args.num_layers,
                  "The first so many (default: all of a directory, 1 of a preset)");
  options.input_file(
      "--workload", args.workload_file,
      "JSONL, or CSV with TIMESTAMP,ContextTokens,GeneratedTokens (default: generated)");
  options.integer(
      "--requests", args.num_requests,
      fmt::format("The first so many (default: all of a file, {} generated)", kGeneratedRequests));
  options.integer("--seed", args.seed, "Of token ids, preset weights and generated requests",
                  {0, std::numeric_limits<std::int64_t>::max()});
  options.word("--arrivals", args.arrivals, "When requests may start", {"real", "x10", "none"});
  options.word("--dtype", args.dtype, "Of weights, activations and cache", {"f32", "f16", "bf16"});
}

void add_engine_options(Options& options, RunArgs& args) {
  EngineOptions& engine = args.engine;
  options.integer("--block-size", engine.block_size, "Tokens per cache block");
  options.integer("--num-blocks", engine.num_blocks,
                  "Cache blocks of layers that see all; those with a window have as many or what "
                  "their windows need (default: enough)");
  options.integer("--max-num-seqs", engine.max_num_seqs, "Most requests of a step");
  options.integer("--workspace-rows", engine.workspace_rows,
                  "Most context rows that a prefill of latent attention gathers at once (default: "
                  "by formula)");
  options.integer("--token-budget", engine.token_budget, "Most tokens of a step");
  options.word("--context-plan", args.context_plan,
               "How prefills get at context (default: packed chunks with latent attention, paged "
               "with grouped queries)",
               {"packed", "equal", "paged"});
  const auto& formats = kv_format_names();
  options.word("--kv-format", args.engine.kv_format,
               "How rows are stored in the cache (default: in the model's dtype)",
               std::vector<std::string>(formats.begin(), formats.end()));
  options.word("--prefix-reuse", args.prefix_reuse, "Keep the blocks of shared prefixes",
               {"on", "off"});
  options.integer("--draft-tokens", engine.draft_tokens,
                  "Tokens that a decode drafts behind its known one, 0 to 63 (default: 0)",
                  {0, 63});
  options.fraction("--acceptance", engine.draft_acceptance,
                   "Probability that a drafted token is right, by a seeded hash");
  options.needs("--acceptance", "--draft-tokens");
}

}  // namespace

Command declare_run(Options& options) {
  auto args = std::make_shared<RunArgs>();
  add_workload_options(options, *args);
  add_engine_options(options, *args);
  add_runtime_options(options, args->runtime);
  options.flag("--verify", args->verify, "Check sampled rows against float64");
  options.flag("--compare", args->compare,
               "Measure against expanded keys and values, and against expanding every step");
  options.output_file("--json", args->json_file, "Write the report to a file");
  options.text("--dump", args->dump_directory, "Write each request's outputs to a directory",
               "DIR");
  return [args] { return run(*args); };
}

}  // namespace fovea::cli
