// What a step brings to every attention layer, of either kind.
#pragma once

#include <cstdint>

#include "fovea/ops.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// What a step may be at most. Plans must be made for the context's plan_target.
struct AttentionLimits {
  std::int64_t max_tokens = 0;            ///< Rows of a step.
  std::int64_t max_num_seqs = 0;          ///< Requests of a step.
  std::int64_t workspace_rows = 0;        ///< Context rows of a chunk; MLA only.
  std::int64_t max_seq_len = 0;           ///< Keys of a request.
  std::int64_t max_decode_query_len = 1;  ///< Query tokens of a decode.
};

/// A step's operands, shared by all layers of a KV group but for the cache.
struct AttentionStep {
  const BatchPlan* plan = nullptr;  ///< Null: profile run (see MlaLayer::operator()).
  BlockTableView block_table = {};  ///< [requests of the batch, width], decodes first.
  TensorView slot_mapping = {};     ///< [T] i32 or i64; absent: nothing is appended.
  TensorView positions = {};  ///< [T] or [1, T], with multi-axis rotation [3, T]; may be absent
                              ///< when nothing is rotated.
  AttentionLimits profile_limits = {};  ///< Without a plan: what the worst step is.
  /// Optional [T] i32: the adapter of each row in the layer's LoRA weights; -1: none.
  /// AttentionLayer only: MLA has no LoRA.
  TensorView lora_ids = {};
  /// Optional, as prepare() of the first of these layers left it.
  TensorView prepared = {};
};

}  // namespace fovea
