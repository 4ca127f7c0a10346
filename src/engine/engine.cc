// Serving: requests arrive, the scheduler picks rows, the step runner computes them.
#include "fovea/engine.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <thread>

#include "core/check.h"
#include "engine/metrics.h"
#include "engine/scheduler.h"
#include "engine/step_runner.h"

namespace fovea {
namespace {

using engine::Metrics;
using engine::ScheduledRequest;
using engine::Scheduler;
using engine::SchedulerOptions;
using engine::StepLimits;
using engine::StepRunner;

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
// Capacities up to a million leave every product of two within 64 bits, with room for bytes.
constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 20;
// How long an idle engine may overlook an interruption.
constexpr double kLongestSleep_s = 0.02;

void check_option(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  FOVEA_CHECK(value >= least && value <= most, invalid_argument, "{} is {}, must be from {} to {}",
              name, value, least, most);
}

void check_options(const EngineOptions& options) {
  check_option("block_size", options.block_size, 1, kMaxCapacity);
  check_option("num_blocks", options.num_blocks, 0, kMaxCount);
  check_option("max_num_seqs", options.max_num_seqs, 1, kMaxCapacity);
  check_option("token_budget", options.token_budget, 1, kMaxCount);
  check_option("workspace_rows", options.workspace_rows, 0, kMaxCount);
  if (options.workspace_rows == 0) return;
  FOVEA_CHECK(options.workspace_rows >= options.block_size, invalid_argument,
              "workspace_rows is {}, must be at least block_size, {}: a chunk of context is whole "
              "blocks",
              options.workspace_rows, options.block_size);
  const std::int64_t least = options.block_size * options.max_num_seqs;
  FOVEA_CHECK(options.context_plan == ContextPlanKind::packed || options.workspace_rows >= least,
              invalid_argument,
              "workspace_rows is {}, must be at least {} with the equal context plan: block_size, "
              "{}, for each of max_num_seqs, {}",
              options.workspace_rows, least, options.block_size, options.max_num_seqs);
}

double arrival_rate(Arrivals arrivals) {
  switch (arrivals) {
    case Arrivals::real:
      return 1;
    case Arrivals::x10:
      return 10;
    case Arrivals::none:
      break;
  }
  return std::numeric_limits<double>::infinity();
}

/// Positions that the model's cos/sin table has.
std::int64_t max_position(const Model& model) {
  return std::min(model.config().max_position, model.config().groups[0].rope.max_position);
}

/// The `count` largest values.
std::vector<std::int64_t> largest(std::vector<std::int64_t> values, std::int64_t count) {
  const auto kept = std::min<std::size_t>(values.size(), static_cast<std::size_t>(count));
  std::partial_sort(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(kept),
                    values.end(), std::greater<>());
  values.resize(kept);
  return values;
}

/// What the workload's requests, as far as the model can serve them, need of everything.
StepLimits find_limits(const Workload& workload, const EngineOptions& options,
                       std::int64_t positions) {
  std::vector<std::int64_t> tokens;
  for (const RequestSpec& spec : workload.requests) {
    const bool valid = spec.prompt_tokens >= 1 && spec.answer_tokens >= 1;
    if (valid && spec.computed_tokens() <= positions) tokens.push_back(spec.computed_tokens());
  }
  tokens = largest(std::move(tokens), options.max_num_seqs);
  StepLimits limits;
  limits.block_size = options.block_size;
  limits.context_plan = options.context_plan;
  limits.max_num_seqs = std::max<std::int64_t>(1, std::ssize(tokens));
  limits.max_seq_len = tokens.empty() ? 1 : tokens.front();
  std::int64_t all_blocks = 0;
  for (std::int64_t count : tokens) {
    all_blocks += (count + options.block_size - 1) / options.block_size;
  }
  limits.num_blocks = options.num_blocks > 0 ? options.num_blocks : all_blocks;
  limits.max_rows = std::clamp<std::int64_t>(
      std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}), 1, options.token_budget);
  limits.workspace_rows = options.workspace_rows > 0
                              ? options.workspace_rows
                              : workspace_rows({.max_model_len = limits.max_seq_len,
                                                .max_num_seqs = limits.max_num_seqs,
                                                .block_size = options.block_size});
  return limits;
}

/// Wall time without what observers and hooks took.
class ServeClock {
 public:
  double now_s() const { return wall_s() - excluded_s_; }
  double wall_s() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
  void exclude(double seconds) { excluded_s_ += seconds; }

 private:
  Clock::time_point begin_ = Clock::now();
  double excluded_s_ = 0;
};

/// One call of Engine::serve.
class Serving {
 public:
  Serving(const OpContext& ctx, const Model& model, const EngineOptions& options,
          const Workload& workload, const ServeHooks& hooks)
      : ctx_(ctx),
        model_(model),
        workload_(workload),
        hooks_(hooks),
        limits_(find_limits(workload, options, max_position(model))),
        runner_(ctx, model, limits_),
        pool_(limits_.num_blocks, limits_.block_size),
        scheduler_(workload, pool_,
                   {.max_num_seqs = options.max_num_seqs,
                    .token_budget = options.token_budget,
                    .max_position = max_position(model),
                    .vocab_size = model.config().vocab_size,
                    .prefix_reuse = options.prefix_reuse}),
        metrics_(model) {
    const double rate = arrival_rate(options.arrivals);
    for (std::int64_t i = 0; i < std::ssize(workload.requests); ++i) {
      const RequestSpec& spec = workload.requests[static_cast<std::size_t>(i)];
      arrivals_s_.push_back(spec.arrival_s / rate);
      std::string reason = scheduler_.refusal(i);
      if (reason.empty()) {
        order_.push_back(i);
        tokens_ += spec.computed_tokens();
      } else {
        report_.refused.push_back({i, std::move(reason)});
      }
    }
    std::stable_sort(order_.begin(), order_.end(), [this](std::int64_t a, std::int64_t b) {
      return arrival_s(a) < arrival_s(b);
    });
  }

  ServeReport run() {
    while (!stopped()) {
      admit_arrivals();
      const std::vector<ScheduledRequest>& step = scheduler_.schedule();
      if (!step.empty()) {
        run_step(step);
      } else if (num_arrived_ < order_.size()) {
        const double wait_s = arrival_s(order_[num_arrived_]) - clock_.now_s();
        std::this_thread::sleep_for(
            std::chrono::duration<double>(std::clamp(wait_s, 0.0, kLongestSleep_s)));
      } else {
        break;
      }
    }
    return finish();
  }

 private:
  double arrival_s(std::int64_t request) const {
    return arrivals_s_[static_cast<std::size_t>(request)];
  }
  bool stopped() const { return hooks_.stop != nullptr && hooks_.stop->load(); }

  void admit_arrivals() {
    const double now_s = clock_.now_s();
    while (num_arrived_ < order_.size() && arrival_s(order_[num_arrived_]) <= now_s) {
      scheduler_.add(order_[num_arrived_++]);
    }
  }

  void run_step(std::span<const ScheduledRequest> step) {
    const StepRunner::Times times = runner_.run(workload_, step, hooks_.observers);
    clock_.exclude(times.observer_ms / 1e3);
    metrics_.on_step(runner_.plan(), step, times.busy_ms, arrivals_s_, clock_.now_s());
    for (const ScheduledRequest& scheduled : step) num_finished_ += scheduled.finishes;
    scheduler_.complete();
    if (!hooks_.progress) return;
    const double before_s = clock_.wall_s();
    hooks_.progress({.requests_done = num_finished_ + std::ssize(report_.refused),
                     .requests = std::ssize(workload_.requests),
                     .tokens_done = scheduler_.tokens_done(),
                     .tokens = tokens_});
    clock_.exclude(clock_.wall_s() - before_s);
  }

  ServeReport finish() {
    metrics_.fill(report_);
    report_.unfinished = std::ssize(order_) - report_.finished;
    report_.wall_ms = clock_.wall_s() * 1e3;
    report_.peak_blocks = scheduler_.peak_blocks();
    report_.num_blocks = pool_.num_blocks();
    report_.prefix_hit_tokens = scheduler_.prefix_hit_tokens();
    report_.preemptions = scheduler_.num_preemptions();
    report_.cache_bytes = runner_.cache_bytes();
    report_.workspace_bytes = runner_.workspace_bytes();
    report_.peak_workspace_bytes = ctx_.workspace->peak();
    return std::move(report_);
  }

  const OpContext& ctx_;
  const Model& model_;
  const Workload& workload_;
  const ServeHooks& hooks_;
  StepLimits limits_;
  StepRunner runner_;  // Before the pool: caches that do not fit are refused before it is built.
  BlockPool pool_;
  Scheduler scheduler_;
  Metrics metrics_;
  ServeReport report_;
  std::vector<double> arrivals_s_;   ///< [requests of the workload], on the clock of serving.
  std::vector<std::int64_t> order_;  ///< Requests that are served, in order of arrival.
  std::size_t num_arrived_ = 0;      ///< Of order_.
  std::int64_t num_finished_ = 0;
  std::int64_t tokens_ = 0;  ///< That all of order_ compute.
  ServeClock clock_;
};

}  // namespace

struct Engine::State {
  const OpContext& ctx;
  const Model& model;
  EngineOptions options;
};

Engine::Engine(const OpContext& ctx, const Model& model, const EngineOptions& options)
    : state_(new State{ctx, model, options}) {
  check_options(options);
}
Engine::~Engine() = default;

ServeReport Engine::serve(const Workload& workload, const ServeHooks& hooks) {
  return Serving(state_->ctx, state_->model, state_->options, workload, hooks).run();
}

}  // namespace fovea
