// What serving cost.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler.h"
#include "fovea/engine.h"

namespace fovea::engine {

/// Floating-point operations of one layer in one step, a multiply-add being two: projections, the
/// expansion of context, and attention over the keys that each query sees, masked ones not counted.
double layer_flops(const MlaDims& dims, const BatchPlan& plan);

/// Collects a step at a time.
class Metrics {
 public:
  explicit Metrics(const Model& model) : model_(model) {}

  /// `arrivals_s` [requests of the workload] and `now_s` are of one clock; now is after the step.
  void on_step(const BatchPlan& plan, std::span<const ScheduledRequest> step, double busy_ms,
               std::span<const double> arrivals_s, double now_s);
  /// Fills the fields that are counted or measured step by step.
  void fill(ServeReport& report) const;

 private:
  const Model& model_;
  ServeReport counts_;
  double flops_ = 0;
  double prefill_busy_ms_ = 0;       ///< Of the steps with prefills.
  std::int64_t prefill_tokens_ = 0;  ///< Prompt tokens computed in them.
  std::vector<double> decode_step_ms_;
  std::vector<double> decode_token_ms_;
  std::vector<double> first_token_ms_;
};

}  // namespace fovea::engine
