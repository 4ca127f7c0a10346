// fovea check: random shapes of every op against the float64 oracle, for a given time.
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <map>

#include "cases/problem.h"
#include "commands.h"
#include "fovea/error.h"
#include "interrupt.h"
#include "table.h"

namespace fovea::cli {
namespace {

using Clock = std::chrono::steady_clock;
/// More than these say nothing new.
constexpr std::int64_t kFailuresShown = 10;

struct CheckArgs {
  std::int64_t seconds = 10;
  std::int64_t seed = 0;
  std::string case_line;
  RuntimeArgs runtime;
};

/// One way to run ops on this machine.
struct Target {
  std::string backend;
  std::string isa;
  std::unique_ptr<ToolRuntime> runtime;
  std::string name() const { return backend + "/" + isa; }
};

std::vector<Target> make_targets(const RuntimeArgs& args) {
  constexpr std::array<std::array<const char*, 2>, 8> kAll = {
      {{"reference", "scalar"}, {"cpu", "scalar"}, {"cpu", "avx2"}, {"cpu", "avx512"},
       {"cpu", "avx512_bf16"}, {"cpu", "neon"}, {"cuda", "auto"}, {"cuda", "plain"}}};
  std::vector<Target> targets;
  std::string reason;  // Of the last that was skipped.
  for (const auto& [backend, isa] : kAll) {
    if (args.backend != "auto" && args.backend != backend) continue;
    try {
      RuntimeArgs forced = args;
      forced.backend = backend;
      targets.push_back({backend, isa, std::make_unique<ToolRuntime>(forced, isa)});
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported) throw;
      if (reason != error.what()) fmt::print("skipping {}/{}: {}\n", backend, isa, error.what());
      reason = error.what();
    }
  }
  if (targets.empty()) throw Error(ErrorCode::unsupported, reason);
  return targets;
}

class Checker {
 public:
  explicit Checker(std::vector<Target> targets) : targets_(std::move(targets)) {}

  void check(const cases::CaseLine& line) {
    for (const Target& target : targets_) check(line, target);
  }
  std::string summary() const {
    Table table({"op", "on", "cases", "failed", "worst error: f32", "f16", "bf16"});
    for (const auto& [key, tally] : tallies_) {
      std::vector<std::string> row = {key[0], key[1], std::to_string(tally.cases),
                                      std::to_string(tally.failed)};
      for (const double worst : tally.worst_errors) row.push_back(format_number(worst));
      table.add(std::move(row));
    }
    return table.to_text();
  }
  std::int64_t num_cases() const { return num_cases_; }
  std::int64_t num_failed() const { return num_failed_; }

 private:
  struct Tally {
    std::int64_t cases = 0;
    std::int64_t failed = 0;
    std::array<double, 3> worst_errors = {};  ///< f32, f16, bf16.
  };

  void check(const cases::CaseLine& line, const Target& target) {
    Tally& tally = tallies_[{line.op(), target.name()}];
    ++tally.cases;
    ++num_cases_;
    std::string failure;
    try {
      const auto problem = cases::make_problem(line, **target.runtime);
      problem->run();
      wait(**target.runtime);
      const cases::CheckResult result = problem->check();
      double& worst = tally.worst_errors[static_cast<std::size_t>(line.dtype())];
      worst = std::max(worst, result.worst_error);
      if (!result.passed()) {
        failure = fmt::format("error {} above {}: {}", format_number(result.worst_error),
                              format_number(result.limit), result.worst_place);
      }
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (failure.empty()) return;
    ++tally.failed;
    if (++num_failed_ > kFailuresShown) return;
    fmt::print("FAILED {}\n  FOVEA_ISA={} fovea check --backend {} --threads {} --case \"{}\"\n",
               failure, target.isa, target.backend, (*target.runtime)->num_threads(),
               line.to_text());
    std::fflush(stdout);
  }

  std::vector<Target> targets_;
  std::map<std::array<std::string, 2>, Tally> tallies_;
  std::int64_t num_cases_ = 0;
  std::int64_t num_failed_ = 0;
};

/// One line on what FOVEA_BACKEND and FOVEA_ISA ask for: how a failure is looked at again.
std::vector<Target> make_target_of_environment(const RuntimeArgs& args) {
  auto runtime = std::make_unique<ToolRuntime>(args);
  std::vector<Target> targets;
  const std::string backend((*runtime)->backend());
  const std::string isa((*runtime)->isa());
  targets.push_back({backend, isa, std::move(runtime)});
  return targets;
}

Checker check_random_cases(const CheckArgs& args) {
  Checker checker(make_targets(args.runtime));
  const InterruptGuard guard;
  const auto end = Clock::now() + std::chrono::seconds(args.seconds);
  // Every op gets its turn with every dtype, whatever the time.
  for (std::uint64_t round = 0;; ++round) {
    for (const std::string& op : cases::case_ops()) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        if (Clock::now() >= end || InterruptGuard::requested()) return checker;
        checker.check(cases::random_case(op, dtype, static_cast<std::uint64_t>(args.seed) + round));
      }
    }
  }
}

/// A line that names no problem is the user's mistake; what else goes wrong is a failed case.
void refuse_bad_line(const cases::CaseLine& line, const OpContext& ctx) {
  try {
    cases::make_problem(line, ctx);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument) throw;
  }
}

Checker check_given_case(const CheckArgs& args) {
  const cases::CaseLine line = cases::CaseLine::parse(args.case_line);
  std::vector<Target> targets = make_target_of_environment(args.runtime);
  refuse_bad_line(line, **targets.front().runtime);
  Checker checker(std::move(targets));
  checker.check(line);
  return checker;
}

int check(const CheckArgs& args) {
  const Checker checker =
      args.case_line.empty() ? check_random_cases(args) : check_given_case(args);
  fmt::print("{}{} cases, {} failed\n", checker.summary(), checker.num_cases(),
             checker.num_failed());
  return checker.num_failed() == 0 ? 0 : kExitFailure;
}

}  // namespace

Command declare_check(Options& options) {
  auto args = std::make_shared<CheckArgs>();
  options.integer("--seconds", args->seconds, "How long", {1, 1 << 20});
  options.integer("--seed", args->seed, "Of the shapes and values",
                  {0, std::numeric_limits<std::int64_t>::max()});
  options.text("--case", args->case_line, "One case, as a failure printed it", "LINE");
  options.exclude("--case", "--seconds");
  options.exclude("--case", "--seed");
  add_runtime_options(options, args->runtime);
  return [args] { return check(*args); };
}

}  // namespace fovea::cli
