// Decode of any op: items one after the other, then the merge of requests that were split.
#pragma once

#include <algorithm>
#include <cmath>

#include "backends/reference/attend.h"
#include "backends/reference/rows.h"
#include "fovea/ops.h"
#include "plan/extents.h"

namespace fovea::reference {

/// What the decode ops have in common.
struct DecodeCall {
  const DecodeSchedule& schedule;
  const AttentionVariant& variant;
  float sm_scale;
  const TensorView& out;    ///< [T, N, v_dim]
  const TensorView& lse;    ///< Optional [N, T].
  const TensorView& sinks;  ///< Optional [N].
  std::int64_t qk_dim;

  std::int64_t num_heads() const { return out.shape[1]; }
  std::int64_t v_dim() const { return out.shape[2]; }
  /// Doubles of one partial: for each query row and head the output [v_dim], then its lse.
  std::int64_t partial_size() const { return schedule.max_query_len * num_heads() * (v_dim() + 1); }
  std::int64_t longest_item() const {
    std::int64_t longest = 0;
    for (const WorkItem& item : schedule.items) {
      longest = std::max<std::int64_t>(longest, item.kv_end - item.kv_begin);
    }
    return longest;
  }
};

inline std::int64_t split_decode_scratch(const DecodeCall& call) {
  constexpr std::int64_t kElement = sizeof(double);
  return Workspace::rounded(call.qk_dim * kElement) + Workspace::rounded(call.v_dim() * kElement) +
         Workspace::rounded(call.longest_item() * kElement) +
         Workspace::rounded(std::max(call.qk_dim, call.v_dim()) * kElement) +
         Workspace::rounded(call.schedule.num_partials() * call.partial_size() * kElement);
}

/// `Source` has load_query(t, n, row), load_key(request, n, key, row) and load_value of the same
/// arguments; n is the query head.
template <class Source>
class SplitDecode {
 public:
  SplitDecode(const DecodeCall& call, const Source& source, WorkspaceScope& scope)
      : call_(call),
        schedule_(call.schedule),
        source_(source),
        q_(scope.take<double>(call.qk_dim)),
        out_(scope.take<double>(call.v_dim())),
        scratch_{.scores = scope.take<double>(call.longest_item()),
                 .row = scope.take<double>(std::max(call.qk_dim, call.v_dim()))},
        partials_(scope.take<double>(schedule_.num_partials() * call.partial_size())) {}

  void run() {
    for (const WorkItem& item : schedule_.items) run_item(item);
    for (std::size_t r = 0; r < schedule_.seq_lens.size(); ++r) {
      const IndexRange partials{schedule_.partial_begin[r], schedule_.partial_begin[r + 1]};
      if (partials.size() > 0) merge_request(static_cast<std::int32_t>(r), partials);
    }
  }

 private:
  /// Every query row and head of the item's request against the item's keys.
  void run_item(const WorkItem& item) {
    const SequenceExtent extent = extent_of(schedule_, item.request);
    for (std::int64_t i = 0; i < extent.num_queries; ++i) {
      const std::int64_t t = first_token(item.request) + i;
      const KeyInterval keys =
          intersect(visible_keys(call_.variant, i, extent), {item.kv_begin, item.kv_end});
      const auto sees = [&](std::int64_t key) {
        return fovea::sees(call_.variant, i, key, extent);
      };
      for (std::int64_t n = 0; n < call_.num_heads(); ++n) {
        source_.load_query(t, n, q_);
        const bool is_part = item.partial >= 0;
        const QueryRow query{.q = q_,
                             .qk_dim = call_.qk_dim,
                             .v_dim = call_.v_dim(),
                             .keys = keys,
                             .sm_scale = static_cast<double>(call_.sm_scale),
                             .soft_cap = static_cast<double>(call_.variant.soft_cap),
                             .sink = is_part ? kNoSink : sink_of(n)};
        double* out = is_part ? partial(item.partial, i, n) : out_;
        const double lse = attend(
            query, sees,
            [&](std::int64_t key, double* row) { source_.load_key(item.request, n, key, row); },
            [&](std::int64_t key, double* row) { source_.load_value(item.request, n, key, row); },
            scratch_, out);
        if (is_part) {
          out[call_.v_dim()] = lse;
        } else {
          write(t, n, out, lse);
        }
      }
    }
  }

  void merge_request(std::int32_t request, const IndexRange& partials) {
    for (std::int64_t i = 0; i < extent_of(schedule_, request).num_queries; ++i) {
      for (std::int64_t n = 0; n < call_.num_heads(); ++n) {
        merge_row(partials, i, n, first_token(request) + i);
      }
    }
  }

  /// The partials of one query row and head. A sink joins here, once.
  void merge_row(const IndexRange& partials, std::int64_t query, std::int64_t n, std::int64_t t) {
    const std::int64_t width = call_.v_dim();
    double max = kEmptyLse;
    bool has_nan = false;
    for (std::int32_t s = partials.begin; s < partials.end; ++s) {
      const double lse = partial(s, query, n)[width];
      max = std::fmax(max, lse);
      has_nan = has_nan || std::isnan(lse);
    }
    std::fill_n(out_, width, 0.0);
    if (max == kEmptyLse && !has_nan) return write(t, n, out_, kEmptyLse);

    double sum = 0;
    for (std::int32_t s = partials.begin; s < partials.end; ++s) {
      const double* part = partial(s, query, n);
      if (part[width] == kEmptyLse) continue;
      const double weight = std::exp(part[width] - max);
      sum += weight;
      for (std::int64_t d = 0; d < width; ++d) out_[d] += weight * part[d];
    }
    const double denominator = sum + std::exp(sink_of(n) - max);
    for (std::int64_t d = 0; d < width; ++d) out_[d] /= denominator;
    write(t, n, out_, max + std::log(sum));
  }

  void write(std::int64_t t, std::int64_t n, const double* out, double lse) const {
    store(out, row_of(call_.out, t, n));
    if (call_.lse) *call_.lse.ptr<float>({n, t}) = static_cast<float>(lse);
  }
  std::int64_t first_token(std::int32_t request) const {
    return schedule_.query_start_loc[static_cast<std::size_t>(request)];
  }
  double sink_of(std::int64_t n) const {
    return call_.sinks ? static_cast<double>(*call_.sinks.ptr<float>({n})) : kNoSink;
  }
  double* partial(std::int64_t index, std::int64_t query, std::int64_t n) const {
    return partials_ + index * call_.partial_size() +
           (query * call_.num_heads() + n) * (call_.v_dim() + 1);
  }

  const DecodeCall& call_;
  const DecodeSchedule& schedule_;
  const Source& source_;
  double* q_;    ///< [qk_dim]
  double* out_;  ///< [v_dim]
  AttendScratch scratch_;
  double* partials_;
};

}  // namespace fovea::reference
