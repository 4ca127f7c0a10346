// Serving: requests arrive, the scheduler picks rows, the step runner computes them.
#include "fovea/engine.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <thread>

#include "engine/limits.h"
#include "engine/metrics.h"
#include "engine/scheduler.h"
#include "engine/step_runner.h"

namespace fovea {
namespace {

using engine::GroupBlocks;
using engine::GroupUsage;
using engine::KvGroup;
using engine::Metrics;
using engine::ScheduledRequest;
using engine::Scheduler;
using engine::StepLimits;
using engine::StepRunner;

using Clock = std::chrono::steady_clock;

// How long an idle engine may overlook an interruption.
constexpr double kLongestSleep_s = 0.02;

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
        groups_(engine::kv_groups(model)),
        limits_(engine::find_limits(workload, options, model, groups_)),
        runner_(ctx, model, groups_, limits_),
        pools_(make_pools()),
        scheduler_(workload, group_blocks(),
                   {.max_num_seqs = options.max_num_seqs,
                    .token_budget = options.token_budget,
                    .max_position = engine::max_position(model),
                    .vocab_size = model.config().vocab_size,
                    .prefix_reuse = options.prefix_reuse,
                    .drafts = {options.draft_tokens, options.draft_acceptance, workload.seed}}),
        metrics_(model, groups_) {
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
  std::vector<BlockPool> make_pools() const {
    std::vector<BlockPool> pools;
    for (const std::int64_t num_blocks : limits_.num_blocks) {
      pools.emplace_back(num_blocks, limits_.block_size);
    }
    return pools;
  }
  std::vector<GroupBlocks> group_blocks() {
    std::vector<GroupBlocks> blocks;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      blocks.push_back({groups_[g].variant, &pools_[g]});
    }
    return blocks;
  }

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
    std::vector<const BatchPlan*> plans;
    for (std::size_t g = 0; g < groups_.size(); ++g) plans.push_back(&runner_.plan(g));
    metrics_.on_step(plans, step, times, arrivals_s_, clock_.now_s());
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
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const GroupUsage& usage = scheduler_.usage()[g];
      report_.kv_groups.push_back({.num_layers = std::ssize(groups_[g].layers),
                                   .variant = groups_[g].variant,
                                   .num_blocks = pools_[g].num_blocks(),
                                   .peak_blocks = usage.peak_blocks,
                                   .peak_blocks_unfreed = usage.peak_blocks_unfreed,
                                   .freed_blocks = usage.freed_blocks,
                                   .block_bytes = runner_.block_bytes(g)});
    }
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
  std::vector<KvGroup> groups_;
  StepLimits limits_;
  StepRunner
      runner_;  // Before the pools: caches that do not fit are refused before these are made.
  std::vector<BlockPool> pools_;  ///< [groups]
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
  engine::check_options(model, options);
}
Engine::~Engine() = default;

ServeReport Engine::serve(const Workload& workload, const ServeHooks& hooks) {
  return Serving(state_->ctx, state_->model, state_->options, workload, hooks).run();
}

}  // namespace fovea
