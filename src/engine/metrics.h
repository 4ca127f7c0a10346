// What serving cost.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/kv_groups.h"
#include "engine/scheduler.h"
#include "engine/step_runner.h"
#include "fovea/engine.h"

namespace fovea::engine {

/// Floating-point operations of one layer in one step, a multiply-add being two: projections, with
/// latent attention the expansion of visible context, and attention over the keys that each query
/// sees, masked ones not counted.
double layer_flops(const MlaDims& dims, const BatchPlan& plan);
double layer_flops(const GqaDims& dims, const BatchPlan& plan);

/// Collects a step at a time.
class Metrics {
 public:
  /// `groups` are all that have layers.
  Metrics(const Model& model, std::vector<KvGroup> groups)
      : model_(model), groups_(std::move(groups)) {}

  /// `plans` [groups]. `arrivals_s` [requests of the workload] and `now_s` are of one clock; now is
  /// after the step.
  void on_step(std::span<const BatchPlan* const> plans, std::span<const ScheduledRequest> step,
               const StepRunner::Times& times, std::span<const double> arrivals_s, double now_s);
  /// Fills the fields that are counted or measured step by step.
  void fill(ServeReport& report) const;

 private:
  void count_tokens(std::span<const ScheduledRequest> step, std::span<const double> arrivals_s,
                    double now_s);

  const Model& model_;
  std::vector<KvGroup> groups_;
  ServeReport counts_;
  std::int64_t decodes_ =
      0;  ///< Requests of steps that yielded an answer token behind a first one.
  std::int64_t decoded_tokens_ = 0;  ///< Their answer tokens.
  double flops_ = 0;
  double prefill_busy_ms_ = 0;       ///< Of the steps with prefills.
  std::int64_t prefill_tokens_ = 0;  ///< Prompt tokens computed in them.
  std::vector<double> decode_step_ms_;
  std::vector<double> decode_token_ms_;
  std::vector<double> first_token_ms_;
};

}  // namespace fovea::engine
