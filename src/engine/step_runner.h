// Runs one step's rows through the layers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler.h"
#include "fovea/engine.h"

namespace fovea::engine {

/// What a step may be at most.
struct StepLimits {
  std::int64_t max_rows = 0;
  std::int64_t max_num_seqs = 0;
  std::int64_t max_seq_len = 0;
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;
  std::int64_t workspace_rows = 0;  ///< Context rows of a chunk, exactly.
  ContextPlanKind context_plan = ContextPlanKind::packed;
};

/// Caches and buffers of all steps, made and reserved before the first. Layers share the block
/// table, slots, positions and plan; each has a cache of its own, as wide as its own dims say.
class StepRunner {
 public:
  StepRunner(const OpContext& ctx, const Model& model, const StepLimits& limits);

  struct Times {
    double busy_ms = 0;      ///< Layers: norm, attention, residual.
    double observer_ms = 0;  ///< Observers, in between.
  };
  /// `step` is not empty and has its one-row requests first.
  Times run(const Workload& workload, std::span<const ScheduledRequest> step,
            std::span<StepObserver* const> observers);
  /// Of the last run.
  const BatchPlan& plan() const { return plan_; }

  std::int64_t cache_bytes() const;
  std::int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  void fill_batch(const Workload& workload, std::span<const ScheduledRequest> step);
  void fill_hidden(const Workload& workload);
  void add_residual(std::int64_t rows);
  BlockTableView block_table() const {
    return {block_table_.data(), batch_.num_reqs(), table_width_, table_width_};
  }
  LayerTrace trace(std::int64_t layer, const Workload& workload) const;

  const OpContext& ctx_;
  const Model& model_;
  StepLimits limits_;
  std::vector<PagedKvCache> caches_;  ///< [layers]
  std::int64_t workspace_bytes_ = 0;
  std::int64_t num_steps_ = 0;

  Tensor hidden_;  ///< [max_rows, H] the residual stream, in the model's dtype.
  Tensor normed_;  ///< [max_rows, H]
  Tensor output_;  ///< [max_rows, H]
  std::vector<std::int32_t> token_ids_;    ///< [max_rows]
  std::vector<std::int64_t> positions_;    ///< [max_rows]
  std::vector<std::int64_t> slots_;        ///< [max_rows]
  std::vector<std::int32_t> block_table_;  ///< [max_num_seqs, table_width_]
  std::int64_t table_width_ = 0;
  std::vector<std::int32_t> request_of_;
  SequenceBatch batch_;
  BatchPlan plan_;
};

}  // namespace fovea::engine
