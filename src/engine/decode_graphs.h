// Decode steps on a GPU as CUDA graphs: one for each layer and each size of a step.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "fovea/attention_step.h"
#include "fovea/device_graph.h"
#include "fovea/tensor.h"

namespace fovea::engine {

/// Operands of a step of so many requests, one query token each. Lengths, blocks, slots and
/// positions are read from the device's memory, so that one graph serves all steps of its size;
/// requests that a step lacks have length 0 and slot -1.
struct DecodeStep {
  std::int64_t rows = 0;
  std::vector<BatchPlan> plans;      ///< [groups]
  std::vector<AttentionStep> steps;  ///< [groups]
  std::vector<Tensor> prepared;      ///< [groups]
  std::vector<DeviceGraph> graphs;   ///< Of the first layers.
};

/// Sizes are powers of two, and the largest that there may be.
class DecodeGraphs {
 public:
  using MakeStep = std::function<DecodeStep(std::int64_t rows)>;

  explicit DecodeGraphs(const OpContext& ctx) : ctx_(ctx) {}

  /// Whether the context has graphs at all.
  bool available() const;
  /// The step of at least `requests` rows, at most `max_rows`; `make` makes it when it is new.
  DecodeStep& step_for(std::int64_t requests, std::int64_t max_rows, const MakeStep& make);
  /// Calls queue(), which queues layer `layer`, and keeps its work for the next time; launches what
  /// was kept where there is something. Layers come in order.
  void run(DecodeStep& step, std::int64_t layer, const std::function<void()>& queue) const;

 private:
  const OpContext& ctx_;
  std::map<std::int64_t, DecodeStep> steps_;  ///< By rows.
};

}  // namespace fovea::engine
