// Decode of any op: work items spread over workers, partial results combined by who comes last.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numbers>

#include "backends/cpu/float_state.h"
#include "backends/cpu/in_place_state.h"
#include "backends/cpu/pair_state.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"
#include "fovea/ops.h"
#include "plan/extents.h"

namespace fovea::cpu {

/// What rows are kept in: see attend.h.
enum class StateKind : std::uint8_t { f32, pairs, in_place };

/// Whether products with stored keys are summed up as integers: 16 bits are more than queries of
/// two bytes have, but not those of f32.
inline bool meets_fixed_point(const KvFormat& keys, DType query) {
  return keys.dtype == DType::i8 && query != DType::f32;
}
/// The same of stored values, whose sums are as exact as the output is.
inline bool meets_fixed_point(const KvFormat& values, DType query, DType out) {
  return meets_fixed_point(values, query) && out != DType::f32;
}

/// What the decode ops have in common, and the extents of their scratch.
struct DecodeCall {
  const DecodeSchedule& schedule;
  const AttentionVariant& variant;
  const TensorView& out;    ///< [T, N, v_channels]
  const TensorView& lse;    ///< Optional [N, T].
  const TensorView& sinks;  ///< Optional [N].
  std::int64_t num_kv_heads;
  AttendShape shape;               ///< finished() fills in rows and heads.
  std::int64_t max_head_rows = 0;  ///< Of a key head that are worked on at once.
  std::int64_t head_stride = 0;    ///< As HeadRows::stride.

  std::int64_t num_heads() const { return out.shape[1]; }
  /// Query heads that share keys.
  std::int64_t group() const { return num_heads() / num_kv_heads; }
  std::int64_t workers() const { return std::ssize(schedule.worker_begin) - 1; }
  /// Rows of all heads of the longest request.
  std::int64_t request_rows() const { return schedule.max_query_len * num_heads(); }
  DecodeCall finished(StateKind kind) const {
    DecodeCall call = *this;
    call.max_head_rows = std::min(schedule.max_query_len * group(), kMaxRows);
    call.head_stride = kind == StateKind::in_place ? InPlaceState::stride_of(call.max_head_rows)
                                                   : HeadRows::stride_of(call.max_head_rows);
    call.shape.max_heads = std::clamp<std::int64_t>(
        kMaxRows / std::max<std::int64_t>(call.head_stride, 1), 1, num_kv_heads);
    call.shape.max_rows = call.shape.max_heads * call.head_stride;
    call.shape.soft_cap = variant.soft_cap;
    return call;
  }
};

/// The state of a call. `takes_pairs` and `takes_in_place` are what the
/// cache's format says.
inline StateKind state_kind(const Kernels& kernels, const DecodeCall& call, bool takes_pairs,
                            bool takes_in_place) {
  if (takes_in_place && has_few_rows(kernels, call.group())) return StateKind::in_place;
  return takes_pairs ? StateKind::pairs : StateKind::f32;
}

/// Of a worker. The cache's format decides between states, and scratch is sized before that is
/// known.
inline std::int64_t state_bytes(const Kernels& kernels, const DecodeCall& call, DType dtype) {
  const AttendShape shape = call.finished(StateKind::f32).shape;
  std::int64_t bytes = FloatState::bytes(kernels, shape);
  if (kernels.pairs && dtype == DType::bf16) {
    bytes = std::max(bytes, PairState::bytes(kernels, shape));
  }
  if (has_few_rows(kernels, call.group())) {
    const DecodeCall in_place = call.finished(StateKind::in_place);
    bytes = std::max(bytes, InPlaceState::bytes(kernels, in_place.shape));
  }
  return bytes;
}

/// Scratch of a call, each piece rounded.
inline std::int64_t split_decode_bytes(const Kernels& kernels, const DecodeCall& call,
                                       DType dtype) {
  std::int64_t bytes = Workspace::rounded(call.workers() * state_bytes(kernels, call, dtype));
  const std::int64_t partials = call.schedule.num_partials();
  if (partials == 0) return bytes;
  const std::int64_t rows = partials * call.request_rows();
  bytes += Workspace::rounded(rows * call.shape.v_channels * std::int64_t{sizeof(float)});
  bytes += Workspace::rounded(rows * std::int64_t{sizeof(float)});
  bytes +=
      Workspace::rounded(std::ssize(call.schedule.seq_lens) * std::int64_t{sizeof(std::int32_t)});
  return bytes;
}

/// One run of a finished call. `Source` has
///   void load_query(std::int64_t t, std::int64_t n, float* dst): row of shape.qk_channels;
///   Reader keys(std::int32_t request, std::int64_t kv_head): as attend_keys wants it.
/// `State` is what the call was finished for.
///
/// An item's worker takes as many key heads at once as its state has rows for. Rows of one are
/// [query token][group].
template <class State, class Source>
class SplitDecode {
 public:
  SplitDecode(const Kernels& kernels, const DecodeCall& call, std::int64_t state_bytes,
              const Source& source, WorkspaceScope& scope)
      : kernels_(kernels),
        call_(call),
        schedule_(call.schedule),
        source_(source),
        state_bytes_(state_bytes) {
    states_ = scope.take_bytes(call.workers() * state_bytes_);
    const std::int64_t partials = schedule_.num_partials();
    if (partials == 0) return;
    const std::int64_t rows = partials * call.request_rows();
    const std::int64_t requests = std::ssize(schedule_.seq_lens);
    partial_out_ = scope.take<float>(rows * call.shape.v_channels);
    partial_lse_ = scope.take<float>(rows);
    arrived_ = scope.take<std::int32_t>(requests);
    std::fill_n(arrived_, requests, 0);
  }

  /// All in one parallel region, or in none.
  void run(ThreadPool& pool) {
    if (products() >= kProductsPerTask) {
      pool.run(call_.workers(), [this](std::int64_t worker) { run_worker(worker); });
      return;
    }
    for (std::int64_t worker = 0; worker < call_.workers(); ++worker) run_worker(worker);
  }

 private:
  /// Multiply-adds, masked ones too.
  std::int64_t products() const {
    std::int64_t pairs = 0;  // Of query tokens and keys.
    for (const WorkItem& item : schedule_.items) {
      pairs += extent_of(schedule_, item.request).num_queries * (item.kv_end - item.kv_begin);
    }
    return pairs * call_.num_heads() * (call_.shape.qk_channels + call_.shape.v_channels);
  }

  void run_worker(std::int64_t worker) {
    State state(kernels_, call_.shape, states_ + worker * state_bytes_);
    const auto w = static_cast<std::size_t>(worker);
    for (std::int32_t i = schedule_.worker_begin[w]; i < schedule_.worker_begin[w + 1]; ++i) {
      const WorkItem& item = schedule_.items[static_cast<std::size_t>(i)];
      for (std::int64_t head = 0; head < call_.num_kv_heads; head += call_.shape.max_heads) {
        run_item(state, item, head);
      }
      if (item.partial >= 0 && is_last_to_arrive(item.request)) combine(item.request);
    }
  }

  /// Key heads [head, head + shape.max_heads), as far as there are.
  void run_item(State& state, const WorkItem& item, std::int64_t head) {
    const SequenceExtent extent = extent_of(schedule_, item.request);
    const std::int64_t rows = extent.num_queries * call_.group();
    for (std::int64_t first = 0; first < rows; first += call_.max_head_rows) {
      const QueryRows queries{.count = std::min(call_.max_head_rows, rows - first),
                              .rows_per_query = call_.group(),
                              .first_row = first,
                              .extent = extent};
      const HeadRows heads{.num_heads = std::min(call_.shape.max_heads, call_.num_kv_heads - head),
                           .count = queries.count,
                           .stride = call_.head_stride};
      attend_rows(state, item, head, heads, queries);
    }
  }

  void attend_rows(State& state, const WorkItem& item, std::int64_t first_head,
                   const HeadRows& heads, const QueryRows& queries) {
    state.begin(heads);
    for_each_row(heads, queries, [&](std::int64_t row, std::int64_t query, std::int64_t n) {
      const std::int64_t head = first_head * call_.group() + n;
      source_.load_query(first_token_of(item.request) + query, head, state.query_buffer());
      state.set_query(row);
    });
    attend_keys(state, heads, queries, call_.variant, {item.kv_begin, item.kv_end},
                [&](std::int64_t head) { return source_.keys(item.request, first_head + head); });
    for_each_row(heads, queries, [&](std::int64_t row, std::int64_t query, std::int64_t n) {
      const std::int64_t head = first_head * call_.group() + n;
      if (item.partial >= 0) {
        const std::int64_t part = partial_row(item.partial, query, head);
        partial_lse_[part] =
            state.finish(row, row_of(partial_out_ + part * call_.shape.v_channels), kNoSink);
      } else {
        const std::int64_t t = first_token_of(item.request) + query;
        const float lse = state.finish(row, row_of(call_.out, {t, head}), sink_of(head));
        write_lse(t, head, lse);
      }
    });
  }

  /// Calls fn(row of the state, query token, query head counted from the first key head's).
  template <class F>
  void for_each_row(const HeadRows& heads, const QueryRows& queries, F&& fn) const {
    for (std::int64_t head = 0; head < heads.num_heads; ++head) {
      for (std::int64_t r = 0; r < heads.count; ++r) {
        fn(head * heads.stride + r, queries.query_of(r),
           head * call_.group() + (queries.first_row + r) % call_.group());
      }
    }
  }

  /// Who comes last sees what all others of the request wrote.
  bool is_last_to_arrive(std::int32_t request) {
    std::atomic_ref<std::int32_t> arrived(arrived_[request]);
    return arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == partials_of(request).size();
  }

  void combine(std::int32_t request) const {
    const std::int64_t queries = extent_of(schedule_, request).num_queries;
    for (std::int64_t query = 0; query < queries; ++query) {
      for (std::int64_t n = 0; n < call_.num_heads(); ++n) combine_row(request, query, n);
    }
  }

  /// The partials in their order, so that no bit depends on who came last.
  void combine_row(std::int32_t request, std::int64_t query, std::int64_t n) const {
    const KeyInterval partials = partials_of(request);
    const auto lse_of = [&](std::int64_t p) { return partial_lse_[partial_row(p, query, n)]; };
    float largest = kNoKeys;
    for (std::int64_t p = partials.begin; p < partials.end; ++p) {
      largest = std::max(largest, lse_of(p));
    }
    // Without any key: a finite origin, so that weights and sum are 0.
    const float origin = largest == kNoKeys ? 0.f : largest;
    float sum = 0.f;
    for (std::int64_t p = partials.begin; p < partials.end; ++p) {
      sum += std::exp(lse_of(p) - origin);
    }
    const float sink = sink_of(n);
    const float denominator = sink == kNoSink ? sum : sum + std::exp(sink - origin);
    const float inverse = sum == 0.f ? 0.f : 1.f / denominator;

    const std::int64_t t = first_token_of(request) + query;
    const Row out = row_of(call_.out, {t, n});
    const std::int64_t width = call_.shape.v_channels;
    for (std::int64_t c = 0; c < width; c += kRowChunk) {
      const std::int64_t count = std::min(kRowChunk, width - c);
      alignas(64) float total[kRowChunk] = {};
      for (std::int64_t p = partials.begin; p < partials.end; ++p) {
        const float* values = partial_out_ + partial_row(p, query, n) * width + c;
        kernels_.add_weighted(values, std::exp(lse_of(p) - origin), count, total);
      }
      store_row(kernels_, total, inverse, count, out.from(c));
    }
    write_lse(t, n, sum == 0.f ? kNoKeys : origin + std::log(sum));
  }

  std::int64_t first_token_of(std::int32_t request) const {
    return schedule_.query_start_loc[static_cast<std::size_t>(request)];
  }
  KeyInterval partials_of(std::int32_t request) const {
    const auto r = static_cast<std::size_t>(request);
    return {schedule_.partial_begin[r], schedule_.partial_begin[r + 1]};
  }
  std::int64_t partial_row(std::int64_t partial, std::int64_t query, std::int64_t n) const {
    return partial * call_.request_rows() + query * call_.num_heads() + n;
  }
  float sink_of(std::int64_t n) const {
    return call_.sinks ? *call_.sinks.ptr<float>({n}) : kNoSink;
  }
  void write_lse(std::int64_t t, std::int64_t n, float lse) const {
    if (call_.lse) *call_.lse.ptr<float>({n, t}) = lse;
  }

  static constexpr float kNoKeys = -std::numeric_limits<float>::infinity();

  const Kernels& kernels_;
  const DecodeCall& call_;
  const DecodeSchedule& schedule_;
  const Source& source_;
  std::int64_t state_bytes_;
  std::byte* states_;                ///< [workers][state_bytes]
  float* partial_out_ = nullptr;     ///< [partials][request_rows][v_channels]
  float* partial_lse_ = nullptr;     ///< [partials][request_rows]
  std::int32_t* arrived_ = nullptr;  ///< [requests] partials that are done.
};

/// `call` is not finished yet.
template <class Source>
void run_split_decode(const Kernels& kernels, const OpContext& ctx, const DecodeCall& call,
                      DType dtype, StateKind kind, const Source& source) {
  WorkspaceScope scope(*ctx.workspace);
  const std::int64_t bytes = state_bytes(kernels, call, dtype);
  const DecodeCall finished = call.finished(kind);
  switch (kind) {
    case StateKind::f32:
      SplitDecode<FloatState, Source>(kernels, finished, bytes, source, scope).run(*ctx.pool);
      break;
    case StateKind::pairs:
      SplitDecode<PairState, Source>(kernels, finished, bytes, source, scope).run(*ctx.pool);
      break;
    case StateKind::in_place:
      SplitDecode<InPlaceState, Source>(kernels, finished, bytes, source, scope).run(*ctx.pool);
      break;
  }
}

}  // namespace fovea::cpu
