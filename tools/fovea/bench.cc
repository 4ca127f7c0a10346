// fovea bench: how long cases take, against what this machine can do at most.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

#include "cases/problem.h"
#include "cases/suites.h"
#include "commands.h"
#include "fovea/error.h"
#include "fovea/machine.h"
#include "interrupt.h"
#include "machine_json.h"
#include "table.h"

namespace fovea::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct BenchArgs {
  std::vector<std::string> suites;
  std::vector<std::string> case_lines;
  double seconds_per_case = 0.5;
  std::int64_t required_percent = 0;
  std::string json_file;
  RuntimeArgs runtime;
};

struct Timing {
  std::string name;
  cases::Work work;
  double median_ms = 0;
  double p10_ms = 0;
  double p90_ms = 0;
  double gflops_per_s() const { return work.flops / median_ms * 1e-6; }
  double gbytes_per_s() const { return work.bytes / median_ms * 1e-6; }
};

/// What bounds a case on this machine, and how near it comes.
struct Limit {
  const char* name = "";
  double percent = 0;
};

Limit limit_of(const Timing& timing, const MachinePeaks& peaks) {
  const double compute_ms = timing.work.flops / peaks.f32_fma_gflops * 1e-6;
  const double memory_ms = timing.work.bytes / peaks.read_gbps * 1e-6;
  if (compute_ms > memory_ms) return {"f32 FMA", 100 * compute_ms / timing.median_ms};
  return {"memory", 100 * memory_ms / timing.median_ms};
}

/// Attention that sees no key has none, whatever its operands weigh; other ops move bytes at least.
bool has_work(const cases::CaseLine& line, const cases::Work& work) {
  const bool is_attention = line.op().ends_with("_decode") || line.op() == "attention_prefill";
  return work.flops > 0 || (work.bytes > 0 && !is_attention);
}

Timing time_case(const cases::CaseLine& line, const OpContext& ctx, double seconds) {
  constexpr std::size_t kMinRuns = 5;
  const auto problem = cases::make_problem(line, ctx);
  problem->run();  // Touches all memory and wakes the threads.
  std::vector<double> ms;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (ms.size() < kMinRuns || Clock::now() < end) {
    const auto start = Clock::now();
    problem->run();
    ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::sort(ms.begin(), ms.end());
  return {.name = line.to_text(),
          .work = problem->work(),
          .median_ms = ms[ms.size() / 2],
          .p10_ms = ms[ms.size() / 10],
          .p90_ms = ms[ms.size() * 9 / 10]};
}

std::string read_suite(const std::string& name) {
  for (const cases::Suite& suite : cases::kSuites) {
    if (suite.name == name) return std::string(suite.text);
  }
  std::error_code error;
  std::ifstream file(name);
  if (!file || std::filesystem::is_directory(name, error)) {
    std::vector<std::string_view> names;
    for (const cases::Suite& suite : cases::kSuites) names.push_back(suite.name);
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--suite: was '{}', must be one of {} or a file of cases", name,
                            fmt::join(names, ", ")));
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<cases::CaseLine> collect_cases(const BenchArgs& args) {
  std::vector<cases::CaseLine> lines;
  for (const std::string& line : args.case_lines) lines.push_back(cases::CaseLine::parse(line));
  std::vector<std::string> suites = args.suites;
  if (suites.empty() && lines.empty()) {
    for (const cases::Suite& suite : cases::kSuites) suites.emplace_back(suite.name);
  }
  for (const std::string& suite : suites) {
    std::vector<cases::CaseLine> parsed = cases::parse_case_lines(read_suite(suite));
    if (parsed.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--suite: '{}' has no case, must have at least one", suite));
    }
    for (cases::CaseLine& line : parsed) lines.push_back(std::move(line));
  }
  return lines;
}

/// The better of two: what disturbs the machine only ever takes away.
MachinePeaks better(const MachinePeaks& a, const MachinePeaks& b) {
  return {.f32_fma_gflops = std::max(a.f32_fma_gflops, b.f32_fma_gflops),
          .read_gbps = std::max(a.read_gbps, b.read_gbps)};
}

nlohmann::ordered_json to_json(const Timing& timing, const Limit& limit) {
  return {{"case", timing.name},
          {"median_ms", timing.median_ms},
          {"p10_ms", timing.p10_ms},
          {"p90_ms", timing.p90_ms},
          {"flops", timing.work.flops},
          {"bytes", timing.work.bytes},
          {"gflops_per_s", timing.gflops_per_s()},
          {"gbytes_per_s", timing.gbytes_per_s()},
          {"limit", limit.name},
          {"percent_of_limit", limit.percent}};
}

int bench(const BenchArgs& args) {
  const std::vector<cases::CaseLine> lines = collect_cases(args);
  const JsonFile json_file(args.json_file);
  const ToolRuntime runtime(args.runtime);
  const InterruptGuard guard;
  MachinePeaks peaks = measure_peaks(*runtime);
  std::vector<Timing> timings;
  for (const cases::CaseLine& line : lines) {
    if (InterruptGuard::requested()) break;
    timings.push_back(time_case(line, *runtime, args.seconds_per_case));
    if (args.required_percent > 0 && !has_work(line, timings.back().work)) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--require-percent: '{}' has no work, must have some to reach a "
                              "share of a limit",
                              line.to_text()));
    }
  }
  peaks = better(peaks, measure_peaks(*runtime));

  nlohmann::ordered_json json = describe_machine(*runtime);
  json["peaks"] = {{"f32_fma_gflops_per_s", peaks.f32_fma_gflops},
                   {"read_gbytes_per_s", peaks.read_gbps}};
  fmt::print("{}, {} threads, backend {}, isa {}\n", processor_name(), runtime->num_threads(),
             runtime->backend(), runtime->isa());
  fmt::print("limits measured here: {} GFLOP/s of f32 FMA, {} GB/s read from memory\n\n",
             format_number(peaks.f32_fma_gflops), format_number(peaks.read_gbps));
  Table table({"case", "ms", "GFLOP/s", "GB/s", "limit", "% of limit"});
  std::string slow;
  json["cases"] = nlohmann::ordered_json::array();
  for (const Timing& timing : timings) {
    const Limit limit = limit_of(timing, peaks);
    table.add({timing.name, format_number(timing.median_ms), format_number(timing.gflops_per_s()),
               format_number(timing.gbytes_per_s()), limit.name, format_number(limit.percent)});
    json["cases"].push_back(to_json(timing, limit));
    if (limit.percent < static_cast<double>(args.required_percent)) {
      slow += fmt::format("below {} % of its limit: {}\n", args.required_percent, timing.name);
    }
  }
  fmt::print("{}{}", table.to_text(), slow);
  json_file.write(json);
  if (InterruptGuard::requested()) return kExitInterrupted;
  return slow.empty() ? 0 : kExitFailure;
}

}  // namespace

Command declare_bench(Options& options) {
  auto args = std::make_shared<BenchArgs>();
  options.texts("--suite", args->suites, "Cases by name or from a file (default: all built in)",
                "NAME|FILE");
  options.texts("--case", args->case_lines, "A case, as in \"mla_decode bf16 heads=16 kv=4096\"",
                "LINE");
  options.seconds("--seconds", args->seconds_per_case, "Seconds per case");
  options.integer("--require-percent", args->required_percent,
                  "Fail when a case stays below this share of its limit", {1, 100});
  add_runtime_options(options, args->runtime);
  options.output_file("--json", args->json_file, "Write it to a file");
  return [args] { return bench(*args); };
}

}  // namespace fovea::cli
