#include "layers/step.h"

#include "core/check.h"
#include "layers/rows.h"
#include "ops/checks.h"
#include "plan/extents.h"

namespace fovea {
namespace {

/// Blocks with keys that any query of the request sees, from the window's first on.
template <class Schedule>
void check_request(const char* layer, const BatchPlan& plan, const Schedule& schedule,
                   std::int32_t request, const BlockTableView& table, const PagedKvCache& cache) {
  const SequenceExtent extent = extent_of(schedule, request);
  if (extent.num_queries == 0) return;
  const KeyInterval keys = visible_to_any(plan.variant, {0, extent.num_queries}, extent);
  if (!keys.empty()) check_block_row(layer, table, cache, request, keys.begin, keys.end);
}

/// [T] or, with a multi-axis rotation, [3, T]; flat already.
void check_positions(const TensorView& positions, std::int64_t tokens, bool multi_axis) {
  if (!multi_axis) return check_indices("positions", positions, tokens);
  const bool is_index = positions.dtype == DType::i32 || positions.dtype == DType::i64;
  FOVEA_CHECK(positions && positions.ndim == 2 && positions.shape[0] == 3 &&
                  positions.shape[1] == tokens && is_index,
              invalid_argument,
              "positions is {}, but must be i32[3, {}] or i64[3, {}]: the rotation has three axes",
              positions ? to_string(positions) : "absent", tokens, tokens);
}

}  // namespace

TensorView flat_positions(const TensorView& positions) {
  return positions.ndim == 2 && positions.shape[0] == 1 ? positions.select(0, 0) : positions;
}

void check_step(const AttentionStep& step, const TensorView& hidden, DType dtype,
                std::int64_t hidden_size, const RotaryEmbedding* rotary) {
  const std::int64_t tokens = hidden.ndim == 2 ? hidden.shape[0] : 0;
  check_rows("hidden", hidden, dtype, {tokens, hidden_size});
  if (step.plan == nullptr) return;
  FOVEA_CHECK(step.plan->num_actual_tokens <= tokens, invalid_argument,
              "hidden is {}, but must have the {} rows of the plan", to_string(hidden),
              step.plan->num_actual_tokens);
  if (rotary != nullptr) {
    check_positions(flat_positions(step.positions), tokens, rotary->config().sections.multi_axis());
  }
  if (step.slot_mapping) check_indices("slot_mapping", step.slot_mapping, tokens);
}

void check_lora_ids(const AttentionStep& step, std::int64_t tokens, std::int64_t num_adapters) {
  check_shape("lora_ids", step.lora_ids, DType::i32, {tokens});
  if (step.lora_ids.device != Device{}) return;  // What the host cannot read is not checked.
  for (std::int64_t t = 0; t < step.plan->num_actual_tokens; ++t) {
    const std::int32_t id = *step.lora_ids.ptr<std::int32_t>({t});
    FOVEA_CHECK(id >= -1 && id < num_adapters, invalid_argument,
                "lora_ids[{}] is {}, but must be -1 or one of the layer's {} adapters", t, id,
                num_adapters);
  }
}

BlockTableView requests_from(const BlockTableView& table, std::int64_t first,
                             std::int64_t requests) {
  return {.data = table.data + first * table.stride,
          .requests = requests,
          .width = table.width,
          .stride = table.stride,
          .device = table.device};
}

void check_blocks(const char* layer, const BatchPlan& plan, const BlockTableView& table,
                  const PagedKvCache& cache) {
  const std::int64_t requests = std::int64_t{plan.split.num_decodes} + plan.split.num_prefills;
  FOVEA_CHECK(table.requests >= requests, invalid_argument,
              "block_table has {} rows, but must have one for each of the plan's {} requests",
              table.requests, requests);
  FOVEA_CHECK(table.data != nullptr || requests == 0, invalid_argument,
              "block_table has no data, but must have rows of {} requests", requests);
  for (std::int32_t r = 0; r < plan.split.num_decodes; ++r) {
    check_request(layer, plan, plan.decode, r, table, cache);
  }
  const std::int64_t first = plan.split.num_decodes;
  if (plan.paged_context) {
    const BlockTableView prefills = requests_from(table, first, plan.split.num_prefills);
    for (std::int32_t r = 0; r < plan.split.num_prefills; ++r) {
      check_request(layer, plan, plan.prefill, r, prefills, cache);
    }
  }
  for (const ContextChunk& chunk : plan.chunks) {
    for (std::int32_t i = 0; i < chunk.requests.size(); ++i) {
      const auto c = static_cast<std::size_t>(i);
      if (chunk.seq_lens[c] == 0) continue;
      check_block_row(layer, table, cache, first + chunk.requests.begin + i, chunk.starts[c],
                      std::int64_t{chunk.starts[c]} + chunk.seq_lens[c]);
    }
  }
}

void check_workspace(const OpContext& ctx, std::int64_t needed) {
  const std::int64_t left =
      ctx.workspace != nullptr ? ctx.workspace->capacity() - ctx.workspace->used() : 0;
  FOVEA_CHECK(needed <= left, resource_exhausted,
              "workspace has {} bytes left, but the step needs {}: reserve workspace_bytes", left,
              needed);
}

void take_worst_case(const OpContext& ctx, std::int64_t bytes) {
  ctx.workspace->reserve(bytes);
  WorkspaceScope(*ctx.workspace).take_bytes(bytes);
}

std::int64_t rounded_bytes(DType dtype, std::int64_t count) {
  return Workspace::rounded(bytes_of(dtype, count));
}

TensorView shape_only(DType dtype, std::initializer_list<std::int64_t> shape) {
  alignas(Workspace::kAlignment) static std::byte present;  // As a workspace's views are.
  return TensorView::contiguous(&present, dtype, shape);
}

TensorView no_rows(const OpContext& ctx, DType dtype, std::int64_t width) {
  TensorView rows = shape_only(dtype, {0, width});
  rows.device = ctx.memory.device;
  return rows;
}

PagedKvCache format_only(const KvFormat& format) {
  alignas(Workspace::kAlignment) static std::byte no_rows;
  return PagedKvCache::view(&no_rows, format, {.num_blocks = 0, .block_size = 1});
}

}  // namespace fovea
