// A ragged attention problem where every byte that nobody owns is NaN, and its float64 answer.
#pragma once

#include <optional>
#include <vector>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "ops/backend_test.h"
#include "ops/paged_rows.h"
#include "ops/ragged_problem.h"

namespace fovea::test {

struct PrefillShape {
  std::int64_t heads = 4;
  std::int64_t kv_heads = 4;
  std::int64_t nope = 16;  ///< Width of k; q is nope + rope wide.
  std::int64_t rope = 8;   ///< 0: no k_pe.
  std::int64_t value = 16;
  std::vector<std::int32_t> query_lens{20};
  std::vector<std::int32_t> seq_lens{20};
  std::int64_t padding_rows = 0;
  AttentionVariant variant;
  bool sinks = false;
  bool wide_out = false;
  bool interleaved_kv = false;  ///< k and v are slices of one [Tk, Hk, nope + value], as expanded.
  double logit_stddev = 3;
  std::uint64_t seed = 1;
};

class PrefillProblem {
 public:
  PrefillProblem(const PrefillShape& shape, DType dtype)
      : shape_(shape),
        dtype_(dtype),
        cu_q_(offsets_of(shape.query_lens)),
        cu_k_(offsets_of(shape.seq_lens)),
        tokens_(cu_q_.back() + shape.padding_rows),
        keys_(cu_k_.back() + shape.padding_rows),
        q_(dtype, {tokens_, shape.heads, shape.nope + shape.rope}),
        kv_(dtype, {keys_, shape.kv_heads, shape.nope + shape.value}),
        k_(dtype, {keys_, shape.kv_heads, shape.nope}),
        k_pe_(dtype, {keys_, std::max<std::int64_t>(shape.rope, 1)}),
        v_(dtype, {keys_, shape.kv_heads, shape.value}),
        out_(shape.wide_out ? DType::f32 : dtype, {tokens_, shape.heads, shape.value}),
        lse_(DType::f32, {shape.heads, tokens_}),
        sinks_(DType::f32, {shape.heads}) {
    // Rows behind the last request stay NaN.
    fill_normal(q_.view().slice(0, 0, cu_q_.back()), shape.seed, shape.logit_stddev);
    fill_normal(k().slice(0, 0, cu_k_.back()), shape.seed + 1);
    fill_normal(v().slice(0, 0, cu_k_.back()), shape.seed + 2);
    if (shape.rope > 0) fill_normal(k_pe_.view().slice(0, 0, cu_k_.back()), shape.seed + 3);
    fill_normal(sinks_, shape.seed + 4, 2);
    sm_scale_ = static_cast<float>(1 / std::sqrt(static_cast<double>(shape.nope + shape.rope)));
  }

  const TensorView& q() const { return q_; }
  TensorView k() const {
    return shape_.interleaved_kv ? kv_.view().slice(2, 0, shape_.nope) : k_.view();
  }
  TensorView v() const {
    return shape_.interleaved_kv ? kv_.view().slice(2, shape_.nope, shape_.nope + shape_.value)
                                 : v_.view();
  }
  TensorView k_pe() const { return shape_.rope > 0 ? k_pe_.view() : TensorView{}; }
  const TensorView& out() const { return out_; }
  const TensorView& lse() const { return lse_; }
  const TensorView& sinks() const { return sinks_; }
  const std::vector<std::int32_t>& cu_q() const { return cu_q_; }
  const std::vector<std::int32_t>& cu_k() const { return cu_k_; }
  void set_sm_scale(float sm_scale) { sm_scale_ = sm_scale; }

  AttentionPrefillParams params() const {
    AttentionPrefillParams params;
    params.q = q_;
    params.k = k();
    params.k_pe = k_pe();
    params.v = v();
    params.out = out_;
    params.lse = lse_;
    params.variant = shape_.variant;
    params.sm_scale = sm_scale_;
    if (shape_.sinks) params.sinks = sinks_;
    return params;
  }

  void run(const OpContext& ctx, std::int64_t query_tile = 16) {
    AttentionPrefillParams planned = params();
    const PrefillSchedule schedule = schedule_prefill(cu_q_, cu_k_, query_tile, planned.variant);
    planned.schedule = &schedule;
    run_poisoned(ctx, planned, out_, lse_, [&] { attention_prefill(ctx, planned); });
  }

  void check() const { check(attention_tolerance(dtype_)); }
  void check(RowTolerance tolerance) const {
    const auto [out, lse] = expected();
    EXPECT_TRUE(rows_close(out, out_, tolerance));
    EXPECT_TRUE(values_close(lse, lse_, kLseAbsolute, kLseRelative));
  }

  /// out [Tq, N, Dv] and lse [N, Tq] in float64, padding rows included.
  oracle::AttentionResult expected() const {
    return put_together(cu_q_, tokens_, shape_.heads, shape_.value,
                        [this](std::size_t r) { return expected_of(r); });
  }

 private:
  oracle::AttentionResult expected_of(std::size_t r) const {
    const std::int64_t first = cu_q_[r], queries = shape_.query_lens[r];
    const std::int64_t keys = shape_.seq_lens[r];
    const std::vector<double> q = to_doubles(q_.view().slice(0, first, first + queries));
    const std::vector<double> k = whole_keys(cu_k_[r], keys);
    const std::vector<double> v = to_doubles(this->v().slice(0, cu_k_[r], cu_k_[r] + keys));
    std::vector<double> sinks;
    if (shape_.sinks) sinks = to_doubles(sinks_);
    return oracle::attention({.num_queries = queries,
                              .num_keys = keys,
                              .num_heads = shape_.heads,
                              .num_kv_heads = shape_.kv_heads,
                              .qk_dim = shape_.nope + shape_.rope,
                              .v_dim = shape_.value,
                              .sm_scale = static_cast<double>(sm_scale_),
                              .causal = shape_.variant.causal,
                              .window_left = shape_.variant.window_left,
                              .attention_chunk = shape_.variant.attention_chunk,
                              .soft_cap = static_cast<double>(shape_.variant.soft_cap),
                              .sinks = sinks,
                              .q = q,
                              .k = k,
                              .v = v});
  }

  /// [keys, Hk, nope + rope]: the shared k_pe repeated for every head.
  std::vector<double> whole_keys(std::int64_t first, std::int64_t keys) const {
    const std::vector<double> nope = to_doubles(k().slice(0, first, first + keys));
    std::vector<double> rope;
    if (shape_.rope > 0) rope = to_doubles(k_pe_.view().slice(0, first, first + keys));
    std::vector<double> whole;
    for (std::int64_t j = 0; j < keys; ++j) {
      for (std::int64_t h = 0; h < shape_.kv_heads; ++h) {
        const auto begin = nope.begin() + (j * shape_.kv_heads + h) * shape_.nope;
        whole.insert(whole.end(), begin, begin + shape_.nope);
        const auto pe = rope.begin() + j * shape_.rope;
        whole.insert(whole.end(), pe, pe + shape_.rope);
      }
    }
    return whole;
  }

  PrefillShape shape_;
  DType dtype_;
  std::vector<std::int32_t> cu_q_, cu_k_;
  std::int64_t tokens_, keys_;
  PaddedTensor q_, kv_, k_, k_pe_, v_, out_, lse_, sinks_;
  float sm_scale_ = 0;
};

}  // namespace fovea::test
