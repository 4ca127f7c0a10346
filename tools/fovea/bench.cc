// fovea bench: how long cases take, against what this machine can do at most.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

#include "bench.h"
#include "case_limits.h"
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

}  // namespace

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

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 != 0 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

namespace {

/// Attention that sees no key has none, whatever its operands weigh; other ops move bytes at least.
bool has_work(const cases::CaseLine& line, const cases::Work& work) {
  const bool is_attention = line.op().ends_with("_decode") || line.op() == "attention_prefill";
  return work.flops > 0 || (work.bytes > 0 && !is_attention);
}

}  // namespace

void check_has_work(const BenchArgs& args, const cases::CaseLine& line, const cases::Work& work) {
  if (args.required_percent == 0 || has_work(line, work)) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("--require-percent: '{}' has no work, must have some to reach a share of "
                          "a limit",
                          line.to_text()));
}

std::string complaint(const BenchArgs& args, const std::string& name, double percent) {
  if (percent >= static_cast<double>(args.required_percent)) return {};
  return fmt::format("below {} % of its limit: {}\n", args.required_percent, name);
}

namespace {

using Clock = std::chrono::steady_clock;

/// Rounds that a result needs at least: more than half of those that were asked for.
constexpr std::int64_t min_steady(std::int64_t rounds) { return rounds / 2 + 1; }
/// How far a round's control may be from the median control.
constexpr double kSteady = 0.10;
/// A problem in the caches: its time tells a slow phase of a shared machine, which the limits,
/// measured over registers and memory, do not show.
constexpr const char* kControl = "mla_decode bf16 heads=16 kv=512";

/// A case, and the microseconds of a call in each round.
struct TimedCase {
  TimedCase(const cases::CaseLine& case_line, const OpContext& ctx)
      : line(case_line), problem(cases::make_problem(case_line, ctx)), work(problem->work()) {}

  void time(double seconds) {
    problem->run();  // Wakes the threads, and brings what fits into the caches.
    const auto start = Clock::now();
    std::chrono::duration<double> taken{};
    std::int64_t calls = 0;
    while (calls == 0 || taken.count() < seconds) {
      problem->run();
      ++calls;
      taken = Clock::now() - start;
    }
    round_us.push_back(taken.count() / static_cast<double>(calls) * 1e6);
  }

  /// Decode of grouped queries reads; latent rows and prefill are computed with; of anything else
  /// whichever takes longer.
  Limit limit(const MachinePeaks& peaks) const {
    if (line.op() == "attention_decode") return Limit::read;
    if (line.op() == "mla_decode" || line.op() == "attention_prefill") {
      return arithmetic_limit(line, peaks);
    }
    return longest_limit(line, work, peaks);
  }

  cases::CaseLine line;
  std::unique_ptr<cases::Problem> problem;
  cases::Work work;
  std::vector<double> round_us;
};

/// Of the steady rounds.
struct Result {
  std::string name;
  double time_us = 0;
  double gflops = 0;
  double gbps = 0;
  Limit limit = Limit::read;
  double percent = 0;
};

/// Rounds of everything, one after the other, so that what is compared ran side by side.
class Bench {
 public:
  Bench(const BenchArgs& args, const OpContext& ctx) : args_(args), ctx_(ctx) {
    control_ = std::make_unique<TimedCase>(cases::CaseLine::parse(kControl), ctx);
    for (const cases::CaseLine& line : collect_cases(args)) {
      cases_.push_back(std::make_unique<TimedCase>(line, ctx));
      check_has_work(args, line, cases_.back()->work);
    }
  }

  /// False when interrupted: the round that was going on does not count.
  bool run() {
    for (std::int64_t round = 0; round < args_.rounds; ++round) {
      const MachinePeaks peaks = measure_peaks(ctx_);
      control_->time(args_.seconds_per_case);
      for (const auto& timed : cases_) {
        if (InterruptGuard::requested()) return false;
        timed->time(args_.seconds_per_case);
      }
      peaks_.push_back(peaks);
    }
    return true;
  }

  /// Indices of the rounds whose control is near the median control.
  std::vector<std::size_t> steady_rounds() const {
    const std::vector<double> control(control_->round_us.begin(),
                                      control_->round_us.begin() + std::ssize(peaks_));
    std::vector<std::size_t> steady;
    for (std::size_t i = 0; i < control.size(); ++i) {
      if (std::abs(control[i] / median(control) - 1) <= kSteady) steady.push_back(i);
    }
    return steady;
  }

  std::vector<Result> results(const std::vector<std::size_t>& rounds) const {
    std::vector<Result> results;
    for (const auto& timed : cases_) {
      const Limit limit = timed->limit(peaks_.front());
      std::vector<double> us, percent;
      for (std::size_t i : rounds) {
        us.push_back(timed->round_us[i]);
        percent.push_back(100 * limit_us(limit, timed->work, peaks_[i]) / timed->round_us[i]);
      }
      const double time_us = median(us);
      results.push_back({.name = timed->line.name(),
                         .time_us = time_us,
                         .gflops = timed->work.flops / time_us * 1e-3,
                         .gbps = timed->work.bytes / time_us * 1e-3,
                         .limit = limit,
                         .percent = median(percent)});
    }
    return results;
  }

  MachinePeaks peaks(const std::vector<std::size_t>& rounds) const {
    std::vector<double> fma, dot, read;
    for (std::size_t i : rounds) {
      fma.push_back(peaks_[i].f32_fma_gflops);
      dot.push_back(peaks_[i].bf16_dot_gflops);
      read.push_back(peaks_[i].read_gbps);
    }
    return {.f32_fma_gflops = median(fma),
            .bf16_dot_gflops = median(dot),
            .read_gbps = median(read)};
  }

 private:
  const BenchArgs& args_;
  const OpContext& ctx_;
  std::unique_ptr<TimedCase> control_;
  std::vector<std::unique_ptr<TimedCase>> cases_;
  std::vector<MachinePeaks> peaks_;  ///< Of the whole rounds.
};

nlohmann::ordered_json to_json(const Result& result) {
  return {{"case", result.name},     {"time_us", result.time_us},
          {"gflops", result.gflops}, {"gbps", result.gbps},
          {"limit", name_of(result.limit)}, {"percent_of_limit", result.percent}};
}

void print_header(const OpContext& ctx, const Runtime& runtime, const MachinePeaks& peaks) {
  fmt::print("{}, {} threads, backend {}, isa {}\n", processor_name(), ctx.pool->num_threads(),
             runtime.backend(), runtime.isa());
  fmt::print("limits measured in the same rounds: {} GFLOP/s of f32 FMA, ",
             format_number(peaks.f32_fma_gflops));
  if (peaks.bf16_dot_gflops > 0) {
    fmt::print("{} of bf16 dot products, ", format_number(peaks.bf16_dot_gflops));
  }
  fmt::print("{} GB/s read from memory\n\n", format_number(peaks.read_gbps));
}

int bench(const BenchArgs& args) {
  const ToolRuntime runtime(args.runtime);
  if (runtime->backend() == "cuda") return bench_on_device(args, *runtime);
  const JsonFile json_file(args.json_file);
  const InterruptGuard guard;
  Bench bench(args, *runtime);
  const bool finished = bench.run();
  const std::vector<std::size_t> rounds = bench.steady_rounds();
  if (std::ssize(rounds) < min_steady(args.rounds)) {
    fmt::print("no result: {} of {} rounds were steady, must be {}: try again, or with more "
               "--rounds\n",
               rounds.size(), args.rounds, min_steady(args.rounds));
    return finished ? kExitFailure : kExitInterrupted;
  }
  const MachinePeaks peaks = bench.peaks(rounds);
  nlohmann::ordered_json json = describe_machine(*runtime);
  json["peaks"] = peaks_json(peaks);
  json["rounds"] = {{"run", args.rounds}, {"steady", rounds.size()}};
  json["cases"] = nlohmann::ordered_json::array();
  print_header(*runtime, *runtime, peaks);
  Table table({"case", "us", "GFLOP/s", "GB/s", "limit", "% of limit"});
  std::string slow;
  for (const Result& result : bench.results(rounds)) {
    table.add({result.name, format_number(result.time_us), format_number(result.gflops),
               format_number(result.gbps), name_of(result.limit), format_number(result.percent)});
    json["cases"].push_back(to_json(result));
    slow += complaint(args, result.name, result.percent);
  }
  fmt::print("{}{}", table.to_text(), slow);
  json_file.write(json);
  if (!finished) return kExitInterrupted;
  return slow.empty() ? 0 : kExitFailure;
}

}  // namespace

Command declare_bench(Options& options) {
  auto args = std::make_shared<BenchArgs>();
  options.texts("--suite", args->suites, "Cases by name or from a file (default: all built in)",
                "NAME|FILE");
  options.texts("--case", args->case_lines, "A case, as in \"mla_decode bf16 heads=16 kv=4096\"",
                "LINE");
  options.integer("--rounds", args->rounds, "Rounds of all cases", {1, 1000});
  options.seconds("--seconds", args->seconds_per_case, "Seconds per case and round");
  options.integer("--require-percent", args->required_percent,
                  "Fail when a case stays below this share of its limit", {1, 100});
  add_runtime_options(options, args->runtime);
  options.output_file("--json", args->json_file, "Write it to a file");
  return [args] { return bench(*args); };
}

}  // namespace fovea::cli
