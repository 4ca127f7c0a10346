// What layers of either kind do with a step's operands and its workspace.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "fovea/attention_step.h"
#include "fovea/rotary.h"

namespace fovea {

/// [1, T] as [T]; others as they are.
TensorView flat_positions(const TensorView& positions);

/// hidden is [T, H] and, but for a profile run, has the plan's rows; positions and slots are there
/// for each of them. Without `rotary` there are no positions to check.
void check_step(const AttentionStep& step, const TensorView& hidden, DType dtype,
                std::int64_t hidden_size, const RotaryEmbedding* rotary);

/// lora_ids are there for each of `tokens` rows, and those of the plan's rows are -1 or an adapter.
void check_lora_ids(const AttentionStep& step, std::int64_t tokens, std::int64_t num_adapters);

/// The table's rows of `requests` requests from `first` on.
BlockTableView requests_from(const BlockTableView& table, std::int64_t first,
                             std::int64_t requests);

/// The table has a row for each of the plan's requests, and every block that holds a key which the
/// step reads is one of the cache: checked before anything is appended.
void check_blocks(const char* layer, const BatchPlan& plan, const BlockTableView& table,
                  const PagedKvCache& cache);

/// `needed` bytes are left in the workspace.
void check_workspace(const OpContext& ctx, std::int64_t needed);

/// A profile run: reserves and takes `bytes`.
void take_worst_case(const OpContext& ctx, std::int64_t bytes);

/// Bytes that `count` elements take of a workspace.
std::int64_t rounded_bytes(DType dtype, std::int64_t count);

/// A view with a shape alone: what ops read to size their scratch.
TensorView shape_only(DType dtype, std::initializer_list<std::int64_t> shape);
/// [0, width] where ctx computes.
TensorView no_rows(const OpContext& ctx, DType dtype, std::int64_t width);
/// A cache with a format alone.
PagedKvCache format_only(const KvFormat& format);

}  // namespace fovea
