// Runs one step's rows through the layers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/decode_graphs.h"
#include "engine/drafts.h"
#include "engine/host_mirror.h"
#include "engine/kv_groups.h"
#include "engine/scheduler.h"
#include "fovea/engine.h"

namespace fovea::engine {

/// What a step may be at most.
struct StepLimits {
  std::int64_t max_rows = 0;
  std::int64_t max_num_seqs = 0;
  std::int64_t max_seq_len = 0;
  std::int64_t block_size = 0;
  std::vector<std::int64_t> num_blocks;  ///< [groups]
  std::int64_t workspace_rows = 0;       ///< Context rows of a chunk, exactly.
  ContextPlanKind context_plan = ContextPlanKind::packed;
  std::int64_t draft_tokens = 0;  ///< Of a decode.
  std::string kv_format;          ///< Empty: the model's dtype.
};

/// Caches and buffers of all steps, made and reserved before the first. Layers of a KV group share
/// block table, slots and plan; each has a cache of its own, as wide as its own dims say.
class StepRunner {
 public:
  /// `groups` are all that have layers.
  StepRunner(const OpContext& ctx, const Model& model, const std::vector<KvGroup>& groups,
             const StepLimits& limits);

  struct Times {
    double busy_ms = 0;      ///< Layers: norms, attention, residual.
    double observer_ms = 0;  ///< Observers, in between.
    double step_ms = 0;      ///< All but observers: plans and tables too.
    double kernel_ms = 0;    ///< Of it, in ops and products with weights.
  };
  /// `step` is not empty and has the requests of up to 1 + draft_tokens rows first.
  Times run(const Workload& workload, std::span<const ScheduledRequest> step,
            std::span<StepObserver* const> observers);
  /// Of a group in the last run.
  const BatchPlan& plan(std::size_t group) const { return groups_[group].plan; }

  std::int64_t block_bytes(std::size_t group) const;  ///< Of a block in all layers of the group.
  std::int64_t cache_bytes() const;
  std::int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  /// What the layers of a KV group share.
  struct Group {
    KvGroup kv;
    std::vector<std::int32_t> block_table;  ///< [max_num_seqs, table_width_]
    std::vector<std::int64_t> slots;        ///< [max_rows]
    BatchPlan plan;
    AttentionStep operands;
    // Where ops compute.
    Tensor slot_rows;   ///< [max_rows]
    Tensor table_rows;  ///< [max_num_seqs, table_width_], of decode graphs.
  };
  struct LayerCache {
    PagedKvCache rows;            ///< Latent rows, [K | V], or keys that have a format with scales.
    GqaCache columns;             ///< Of grouped-query attention: keys and values.
    bool has_own_values = false;  ///< columns.v is no part of `rows`.
    std::int64_t row_bytes() const {
      return rows.format().row_bytes() + (has_own_values ? columns.v.format().row_bytes() : 0);
    }
  };

  void make_caches();
  void fill_batch(const Workload& workload, std::span<const ScheduledRequest> step);
  void fill_tables(std::span<const ScheduledRequest> step);
  void make_plans();
  void fill_hidden(const Workload& workload);
  /// So many rows; those past the step's are of nobody.
  void send_rows(std::int64_t rows);
  void send_lengths(std::int64_t requests);
  DecodeStep* find_decode_step(std::span<const ScheduledRequest> step);
  DecodeStep make_decode_step(std::int64_t rows) const;
  PlanOptions plan_options(const AttentionVariant& variant) const;
  void finish(Times& times) const;
  void run_layer(std::int64_t layer, std::int64_t rows, const AttentionStep& step);
  void prepare(std::int64_t layer, const AttentionStep& step) const;
  void add_output(const DecoderLayer& layer, std::int64_t rows);
  std::size_t group_of(std::int64_t layer) const {
    return group_of_layer_[static_cast<std::size_t>(layer)];
  }
  LayerTrace trace(std::int64_t layer, const Workload& workload);

  const OpContext& ctx_;
  const Model& model_;
  HostMirror mirror_;
  DecodeGraphs graphs_;
  StepLimits limits_;
  std::vector<Group> groups_;
  std::vector<std::size_t> group_of_layer_;  ///< [layers]
  std::vector<LayerCache> caches_;           ///< [layers]
  std::int64_t workspace_bytes_ = 0;
  std::int64_t num_steps_ = 0;

  // Where ops compute, in the model's dtype.
  Tensor hidden_;         ///< [max_rows, H] the residual stream.
  Tensor normed_;         ///< [max_rows, H]
  Tensor output_;         ///< [max_rows, H]
  Tensor position_rows_;  ///< [max_rows]
  Tensor seq_len_rows_;   ///< [max_num_seqs], of decode graphs.
  // On the host.
  Tensor embedded_;  ///< [max_rows, H] what hidden_ starts as.
  std::vector<std::int32_t> token_ids_;  ///< [max_rows]
  std::vector<std::int64_t> positions_;  ///< [max_rows]
  std::int64_t table_width_ = 0;
  std::vector<std::int32_t> request_of_;
  std::vector<std::int32_t> num_true_rows_;
  SequenceBatch batch_;
};

}  // namespace fovea::engine
