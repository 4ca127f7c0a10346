#include <algorithm>
#include <atomic>
#include <numbers>

#include "backends/cpu/ops.h"
#include "backends/cpu/paged_kv_rows.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"
#include "plan/extents.h"

namespace fovea::cpu {
namespace {

AttendShape shape_of(const AttentionPrefillParams& params) {
  std::int64_t rows = 0;
  for (const PrefillTile& tile : params.schedule->tiles) {
    rows = std::max<std::int64_t>(rows, tile.query_end - tile.query_begin);
  }
  const std::int64_t qk_channels = params.q.shape[2], v_channels = params.out.shape[2];
  // Rows of k and v are like stored ones without scales.
  const PagedKv& paged = params.paged;
  const KvFormat k_format = paged.k_cache ? paged.k_cache->format() : KvFormat{};
  const KvFormat v_format = paged.v_cache ? paged.v_cache->format() : KvFormat{};
  return {.qk_channels = qk_channels,
          .v_channels = v_channels,
          .max_rows = std::min(rows, kMaxRows),
          .score_factor = params.sm_scale * std::numbers::log2e_v<float>,
          .soft_cap = params.variant.soft_cap,
          .k_groups = StoredPairs::groups(k_format, qk_channels),
          .v_groups = StoredPairs::groups(v_format, v_channels)};
}

/// Views that are absent fit.
bool is_bf16_rows(const TensorView& view) {
  return !view || (view.dtype == DType::bf16 && view.strides[view.ndim - 1] == 1);
}

bool takes_pairs(const Kernels& kernels, const AttentionPrefillParams& params) {
  const std::int64_t qk_channels = params.q.shape[2];
  if (!kernels.pairs || params.q.dtype != DType::bf16 || qk_channels % 2 != 0) return false;
  const bool has_rows =
      is_bf16_rows(params.k) && is_bf16_rows(params.k_pe) && is_bf16_rows(params.v);
  if (!has_rows) return false;
  return !params.paged.k_cache ||
         PagedKvRows::takes_pairs(kernels, params.paged, qk_channels, params.out.shape[2]);
}

/// Of a thread. The cache's format decides between states, and scratch is sized before that is
/// known.
std::int64_t state_bytes(const Kernels& kernels, const AttendShape& shape,
                         const AttentionPrefillParams& params) {
  const std::int64_t bytes = FloatState::bytes(kernels, shape);
  if (!kernels.pairs || params.q.dtype != DType::bf16) return bytes;
  return std::max(bytes, PairState::bytes(kernels, shape));
}

/// A task is a query tile of one head.
std::int64_t num_tasks(const AttentionPrefillParams& params) {
  return static_cast<std::int64_t>(params.schedule->tiles.size()) * params.q.shape[1];
}

/// Multiply-adds, masked ones too.
std::int64_t num_products(const AttentionPrefillParams& params) {
  std::int64_t pairs = 0;  // Of query tokens and keys.
  for (const PrefillTile& tile : params.schedule->tiles) {
    const SequenceExtent extent = extent_of(*params.schedule, tile.request);
    pairs += (tile.query_end - tile.query_begin) * extent.num_keys;
  }
  return pairs * params.q.shape[1] * (params.q.shape[2] + params.out.shape[2]);
}

/// Tasks outnumber threads, and each thread has one state. Scratch is sized for a worst case, so
/// that it may not depend on what is worth a thread.
std::int64_t num_states(const OpContext& ctx, const AttentionPrefillParams& params) {
  return std::min<std::int64_t>(ctx.pool->num_threads(), num_tasks(params));
}

/// Keys and values of one key head of a request, one row after the other.
class KeyRows {
 public:
  KeyRows(const Kernels& kernels, const AttentionPrefillParams& params, std::int64_t first_key,
          std::int64_t kv_head)
      : kernels_(kernels), params_(params), first_key_(first_key), kv_head_(kv_head) {}

  void load(FloatState& state, const KeyInterval& tile, const KeyInterval& next) const {
    for (std::int64_t i = 0; i < tile.size(); ++i) {
      const std::int64_t position = tile.begin + i;
      load_row(kernels_, key(position), key_dim_, state.key(i));
      if (rope_dim_ > 0) {
        load_row(kernels_, rope_key(position), rope_dim_, state.key(i) + key_dim_);
      }
      load_row(kernels_, value(position), value_dim_, state.value(i));
    }
    // k_pe, which all heads share, stays in the cache by itself.
    for (std::int64_t position = next.begin; position < next.end; ++position) {
      prefetch_row(key(position), key_dim_);
      prefetch_row(value(position), value_dim_);
    }
  }

  void load(PairState& state, const KeyInterval& tile, const KeyInterval& next) const {
    const float one = 1.f;
    for (std::int64_t i = 0; i < tile.size(); ++i) {
      const std::int64_t position = tile.begin + i;
      const std::byte* codes = key(position).data;
      if (rope_dim_ > 0) {
        std::byte* copy = state.key_copy(i);
        const std::int64_t key_bytes = key_dim_ * std::int64_t{sizeof(BFloat16)};
        std::copy_n(codes, key_bytes, copy);
        std::copy_n(rope_key(position).data, rope_dim_ * std::int64_t{sizeof(BFloat16)},
                    copy + key_bytes);
        codes = copy;
      }
      state.set_key(i, codes, &one);
      state.set_value(i, value(position).data, &one);
    }
    for (std::int64_t i = 0; i < next.size(); ++i) {
      state.set_next_key(i, key(next.begin + i).data);
      state.set_next_value(i, value(next.begin + i).data);
    }
    state.finish_load(tile.size(), next.size());
  }

 private:
  Row key(std::int64_t position) const {
    return row_of(params_.k, {first_key_ + position, kv_head_});
  }
  Row rope_key(std::int64_t position) const {
    return row_of(params_.k_pe, {first_key_ + position});
  }
  Row value(std::int64_t position) const {
    return row_of(params_.v, {first_key_ + position, kv_head_});
  }

  const Kernels& kernels_;
  const AttentionPrefillParams& params_;
  std::int64_t first_key_;
  std::int64_t kv_head_;
  std::int64_t key_dim_ = params_.k.shape[2];
  std::int64_t rope_dim_ = params_.k_pe ? params_.k_pe.shape[1] : 0;
  std::int64_t value_dim_ = params_.v.shape[2];
};

class Prefill {
 public:
  Prefill(const Kernels& kernels, const AttentionPrefillParams& params, const AttendShape& shape)
      : kernels_(kernels),
        params_(params),
        shape_(shape),
        is_paged_(params.paged.k_cache != nullptr),
        group_(params.q.shape[1] / (is_paged_ ? params.paged.num_kv_heads : params.k.shape[1])) {}

  template <class State>
  void run_task(State& state, std::int64_t task) const {
    // One head after the other: its keys and values stay in the cache for all tiles. The longest
    // tiles come first, so that threads end together.
    const auto tiles = static_cast<std::int64_t>(params_.schedule->tiles.size());
    const std::int64_t head = task / tiles;
    const PrefillTile& tile = params_.schedule->tiles[static_cast<std::size_t>(task % tiles)];
    const SequenceExtent extent = extent_of(*params_.schedule, tile.request);
    const auto request = static_cast<std::size_t>(tile.request);
    for (std::int64_t q = tile.query_begin; q < tile.query_end; q += shape_.max_rows) {
      const QueryRows queries{
          .count = std::min(shape_.max_rows, tile.query_end - q), .first_row = q, .extent = extent};
      if (is_paged_) {
        const PagedKvRows keys(kernels_, params_.paged, tile.request, head / group_,
                               new_tokens(tile.request, extent));
        attend_rows(state, tile.request, queries, head, keys);
      } else {
        const KeyRows keys(kernels_, params_, params_.schedule->cu_seqlens_k[request],
                           head / group_);
        attend_rows(state, tile.request, queries, head, keys);
      }
    }
  }

 private:
  NewTokens new_tokens(std::int32_t request, const SequenceExtent& extent) const {
    if (!params_.k) return {};
    return {.k = &params_.k,
            .v = &params_.v,
            .first_key = extent.num_keys - extent.num_queries,
            .first_row = params_.schedule->cu_seqlens_q[static_cast<std::size_t>(request)]};
  }

  template <class State, class Reader>
  void attend_rows(State& state, std::int32_t request, const QueryRows& queries,
                   std::int64_t head, const Reader& keys) const {
    const std::int64_t first_token =
        params_.schedule->cu_seqlens_q[static_cast<std::size_t>(request)] + queries.first_row;
    const HeadRows rows{.count = queries.count};
    state.begin(rows);
    for (std::int64_t r = 0; r < queries.count; ++r) {
      const Row q = row_of(params_.q, {first_token + r, head});
      load_row(kernels_, q, shape_.qk_channels, state.query_buffer());
      state.set_query(r);
    }
    attend_keys(state, rows, queries, params_.variant, {0, queries.extent.num_keys},
                [&](std::int64_t) -> const Reader& { return keys; });
    const float sink = params_.sinks ? *params_.sinks.ptr<float>({head}) : kNoSink;
    for (std::int64_t r = 0; r < queries.count; ++r) {
      const std::int64_t t = first_token + r;
      const float lse = state.finish(r, row_of(params_.out, {t, head}), sink);
      if (params_.lse) *params_.lse.ptr<float>({head, t}) = lse;
    }
  }

  const Kernels& kernels_;
  const AttentionPrefillParams& params_;
  AttendShape shape_;
  bool is_paged_;
  std::int64_t group_;  ///< Query heads that share keys.
};

template <class State>
void run_tasks(const Kernels& kernels, const OpContext& ctx, const AttentionPrefillParams& params) {
  const AttendShape shape = shape_of(params);
  const std::int64_t states = num_states(ctx, params);
  const std::int64_t bytes = state_bytes(kernels, shape, params);
  WorkspaceScope scope(*ctx.workspace);
  std::byte* memory = scope.take_bytes(states * bytes);
  const Prefill prefill(kernels, params, shape);
  const std::int64_t tasks = num_tasks(params);
  std::atomic<std::int64_t> next_task{0};
  const std::int64_t threads = num_products(params) < kProductsPerTask ? 1 : states;
  ctx.pool->run(threads, [&](std::int64_t i) {
    State state(kernels, shape, memory + i * bytes);
    for (;;) {
      const std::int64_t task = next_task.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      prefill.run_task(state, task);
    }
  });
}

}  // namespace

std::int64_t attention_prefill_bytes(const Kernels& kernels, const OpContext& ctx,
                                     const AttentionPrefillParams& params) {
  return Workspace::rounded(num_states(ctx, params) *
                            state_bytes(kernels, shape_of(params), params));
}

void attention_prefill(const Kernels& kernels, const OpContext& ctx,
                       const AttentionPrefillParams& params) {
  if (takes_pairs(kernels, params)) {
    run_tasks<PairState>(kernels, ctx, params);
  } else {
    run_tasks<FloatState>(kernels, ctx, params);
  }
}

}  // namespace fovea::cpu
