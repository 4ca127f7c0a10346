// A problem of grouped-query attention that the decode op and the prefill op over blocks, rows and
// both all solve, and its float64 answer. Every byte that nobody owns is NaN: also
// the keys before all windows, whose block ids are garbage.
#pragma once

#include <memory>
#include <vector>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "ops/backend_test.h"
#include "ops/paged_rows.h"
#include "ops/ragged_problem.h"

namespace fovea::test {

enum class AttentionPath {
  decode,
  paged_prefill,    ///< All keys from their blocks.
  context_prefill,  ///< The query tokens' keys are rows, those before them in blocks.
  prefill,          ///< All keys are rows.
};
inline constexpr AttentionPath kAttentionPaths[] = {
    AttentionPath::decode, AttentionPath::paged_prefill, AttentionPath::context_prefill,
    AttentionPath::prefill};

struct GqaShape {
  std::int64_t heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t qk_dim = 64;
  std::int64_t v_dim = 64;
  std::int64_t block_size = 16;
  std::vector<std::int32_t> query_lens{1};
  std::vector<std::int32_t> seq_lens{33};
  std::int64_t padding_rows = 0;
  AttentionVariant variant;
  bool sinks = false;
  std::vector<std::uint64_t> draft_tree;  ///< Of all query tokens; decode only.
  bool wide_out = false;                  ///< out in f32 whatever the query's dtype.
  bool head_major = false;                ///< q is [N, T, Dk] seen as [T, N, Dk].
  bool one_cache = false;                 ///< K and V are columns of one cache.
  bool aligned = false;  ///< Query and output rows begin at multiples of 16 bytes.
  double logit_stddev = 3;
  DType cache_dtype = DType::u8;  ///< u8 stands for the query's.
  std::uint64_t seed = 1;
};

class GqaProblem {
 public:
  GqaProblem(const GqaShape& shape, DType dtype)
      : shape_(shape),
        dtype_(dtype),
        query_start_loc_(offsets_of(shape.query_lens)),
        cu_k_(offsets_of(shape.seq_lens)),
        tokens_(query_start_loc_.back() + shape.padding_rows),
        sm_scale_(static_cast<float>(1 / std::sqrt(static_cast<double>(shape.qk_dim)))),
        q_memory_(shape.head_major
                      ? padded_rows(dtype, {shape.heads, tokens_, shape.qk_dim}, shape.aligned)
                      : padded_rows(dtype, {tokens_, shape.heads, shape.qk_dim}, shape.aligned)),
        q_(shape.head_major ? q_memory_.view().transpose(0, 1) : q_memory_.view()),
        sinks_(DType::f32, {shape.heads}),
        out_(padded_rows(shape.wide_out ? DType::f32 : dtype,
                         {tokens_, shape.heads, shape.v_dim}, shape.aligned)),
        lse_(DType::f32, {shape.heads, tokens_}) {
    // Padding rows stay NaN.
    fill_normal(q_.slice(0, 0, query_start_loc_.back()), shape.seed, shape.logit_stddev);
    fill_normal(sinks_, shape.seed + 1, 2);
    for (std::size_t r = 0; r < shape.seq_lens.size(); ++r) {
      owned_.push_back({rows_of(r).first_key(shape.variant), shape.seq_lens[r]});
    }
    make_caches();
  }

  const TensorView& q() const { return q_; }
  const TensorView& out() const { return out_; }
  const TensorView& lse() const { return lse_; }
  const TensorView& sinks() const { return sinks_; }
  const std::vector<std::int32_t>& query_start_loc() const { return query_start_loc_; }
  const std::vector<std::int32_t>& cu_k() const { return cu_k_; }
  std::int64_t tokens() const { return tokens_; }
  void set_sm_scale(float sm_scale) { sm_scale_ = sm_scale; }
  /// [Hk * Dk] and [Hk * Dv] of an owned key.
  TensorView k_row(std::int64_t request, std::int64_t key) const {
    return cache_row(k_cache_, k_rows_->slot(request, key));
  }
  TensorView v_row(std::int64_t request, std::int64_t key) const {
    return cache_row(v_cache_, k_rows_->slot(request, key));
  }

  PagedKv paged() const { return {&k_cache_, &v_cache_, k_rows_->table(), shape_.kv_heads}; }

  AttentionDecodeParams decode_params() const {
    AttentionDecodeParams params;
    params.q = q_;
    params.kv = paged();
    params.out = out_;
    params.lse = lse_;
    params.variant = shape_.variant;
    params.sm_scale = sm_scale_;
    if (shape_.sinks) params.sinks = sinks_;
    return params;
  }

  AttentionPrefillParams paged_prefill_params() const {
    AttentionPrefillParams params;
    params.q = q_;
    params.paged = paged();
    params.out = out_;
    params.lse = lse_;
    params.variant = shape_.variant;
    params.sm_scale = sm_scale_;
    if (shape_.sinks) params.sinks = sinks_;
    return params;
  }

  DecodeSchedule decode_schedule(const OpContext& ctx, std::int32_t workers,
                                 std::int32_t kv_tile) const {
    PlanTarget target = ctx.plan_target;
    if (workers > 0) target.num_workers = workers;
    target.decode_kv_tile = kv_tile;
    return schedule_decode(query_start_loc_, shape_.seq_lens, target, shape_.variant,
                           shape_.draft_tree);
  }

  /// Runs over poisoned outputs and workspace, with a plan for `workers` (0: the context's own).
  void run_decode(const OpContext& ctx, std::int32_t workers = 0, std::int32_t kv_tile = 16) {
    const DecodeSchedule schedule = decode_schedule(ctx, workers, kv_tile);
    AttentionDecodeParams params = decode_params();
    params.schedule = &schedule;
    run_poisoned(ctx, params, out_, lse_, [&] { attention_decode(ctx, params); });
  }

  void run_paged_prefill(const OpContext& ctx, std::int64_t query_tile = 16) {
    AttentionPrefillParams params = paged_prefill_params();
    const PrefillSchedule schedule =
        schedule_prefill(query_start_loc_, cu_k_, query_tile, params.variant);
    params.schedule = &schedule;
    run_poisoned(ctx, params, out_, lse_, [&] { attention_prefill(ctx, params); });
  }

  /// Over a copy of the rows, of the query's dtype.
  void run_prefill(const OpContext& ctx, std::int64_t query_tile = 16) {
    const PaddedTensor k(dtype_, {cu_k_.back() + 1, shape_.kv_heads, shape_.qk_dim}, 7);
    const PaddedTensor v(dtype_, {cu_k_.back() + 1, shape_.kv_heads, shape_.v_dim}, 9);
    for (std::size_t r = 0; r < owned_.size(); ++r) {
      for (std::int64_t j = owned_[r].begin; j < owned_[r].end; ++j) {
        const auto request = static_cast<std::int64_t>(r);
        const std::int64_t row = cu_k_[r] + j;
        copy(k_row(request, j).split(0, shape_.kv_heads, shape_.qk_dim), k.view().select(0, row));
        copy(v_row(request, j).split(0, shape_.kv_heads, shape_.v_dim), v.view().select(0, row));
      }
    }
    AttentionPrefillParams params = paged_prefill_params();
    params.paged = {};
    params.k = k;
    params.v = v;
    const PrefillSchedule schedule =
        schedule_prefill(query_start_loc_, cu_k_, query_tile, params.variant);
    params.schedule = &schedule;
    run_poisoned(ctx, params, out_, lse_, [&] { attention_prefill(ctx, params); });
  }

  /// The query tokens' keys are rows of the query's dtype; what the cache has of them is NaN
  /// meanwhile. No request may have fewer keys than query tokens.
  void run_context_prefill(const OpContext& ctx, std::int64_t query_tile = 16) {
    const PaddedTensor k(dtype_, {tokens_, shape_.kv_heads, shape_.qk_dim}, 7);
    const PaddedTensor v(dtype_, {tokens_, shape_.kv_heads, shape_.v_dim}, 9);
    struct Saved {
      TensorView row;
      Tensor values;
    };
    std::vector<Saved> saved;
    const auto move = [&](const TensorView& row, const TensorView& heads) {
      copy(row.split(0, heads.shape[0], heads.shape[1]), heads);
      saved.push_back({row, Tensor::empty(row.dtype, {row.shape[0]})});
      copy(row, saved.back().values);
      poison(row);
    };
    for (std::size_t r = 0; r < owned_.size(); ++r) {
      const std::int64_t first_new = shape_.seq_lens[r] - shape_.query_lens[r];
      for (std::int64_t i = 0; i < shape_.query_lens[r]; ++i) {
        const auto request = static_cast<std::int64_t>(r);
        move(k_row(request, first_new + i), k.view().select(0, query_start_loc_[r] + i));
        move(v_row(request, first_new + i), v.view().select(0, query_start_loc_[r] + i));
      }
    }
    AttentionPrefillParams params = paged_prefill_params();
    params.k = k;
    params.v = v;
    const PrefillSchedule schedule =
        schedule_prefill(query_start_loc_, cu_k_, query_tile, params.variant);
    params.schedule = &schedule;
    run_poisoned(ctx, params, out_, lse_, [&] { attention_prefill(ctx, params); });
    for (const auto& [row, values] : saved) copy(values, row);
  }

  void run(const OpContext& ctx, AttentionPath path, std::int32_t workers = 0,
           std::int64_t tile = 16) {
    switch (path) {
      case AttentionPath::decode:
        return run_decode(ctx, workers, static_cast<std::int32_t>(tile));
      case AttentionPath::paged_prefill:
        return run_paged_prefill(ctx, tile);
      case AttentionPath::context_prefill:
        return run_context_prefill(ctx, tile);
      case AttentionPath::prefill:
        return run_prefill(ctx, tile);
    }
  }

  /// Compares the last run with the formulas.
  void check() const { check(attention_tolerance(coarser())); }
  void check(RowTolerance tolerance) const {
    const auto [out, lse] = expected();
    EXPECT_TRUE(rows_close(out, out_, tolerance));
    EXPECT_TRUE(values_close(lse, lse_, kLseAbsolute, kLseRelative));
  }

  /// out [T, N, Dv] and lse [N, T] in float64, padding rows included.
  oracle::AttentionResult expected() const { return expected_over(false); }
  /// The same over the magnitudes of values: what roundings of weights are relative to.
  oracle::AttentionResult expected_magnitudes() const { return expected_over(true); }

 private:
  oracle::AttentionResult expected_over(bool magnitudes) const {
    return put_together(query_start_loc_, tokens_, shape_.heads, shape_.v_dim,
                        [&](std::size_t r) { return expected_of(r, rows_of(r), magnitudes); });
  }
  RequestRows rows_of(std::size_t r) const {
    return RequestRows::of(r, query_start_loc_, shape_.seq_lens, shape_.draft_tree);
  }

  oracle::AttentionResult expected_of(std::size_t r, const RequestRows& rows,
                                      bool magnitudes) const {
    const std::int64_t first = query_start_loc_[r];
    const std::vector<double> q = to_doubles(q_.slice(0, first, first + rows.num_queries));
    // What is not owned is NaN: no rule may let it be seen.
    const auto keys = static_cast<std::size_t>(rows.num_keys);
    const auto k_width = static_cast<std::size_t>(shape_.kv_heads * shape_.qk_dim);
    const auto v_width = static_cast<std::size_t>(shape_.kv_heads * shape_.v_dim);
    std::vector<double> k(keys * k_width, std::nan("")), v(keys * v_width, std::nan(""));
    for (std::int64_t j = owned_[r].begin; j < owned_[r].end; ++j) {
      const std::vector<double> k_values = to_doubles(k_row(static_cast<std::int64_t>(r), j));
      const std::vector<double> v_values = to_doubles(v_row(static_cast<std::int64_t>(r), j));
      std::copy(k_values.begin(), k_values.end(),
                k.begin() + j * static_cast<std::ptrdiff_t>(k_width));
      std::copy(v_values.begin(), v_values.end(),
                v.begin() + j * static_cast<std::ptrdiff_t>(v_width));
    }
    for (double& x : v) x = magnitudes ? std::abs(x) : x;
    std::vector<double> sinks;
    if (shape_.sinks) sinks = to_doubles(sinks_);
    return oracle::attention({.num_queries = rows.num_queries,
                              .num_keys = rows.num_keys,
                              .num_heads = shape_.heads,
                              .num_kv_heads = shape_.kv_heads,
                              .qk_dim = shape_.qk_dim,
                              .v_dim = shape_.v_dim,
                              .sm_scale = static_cast<double>(sm_scale_),
                              .causal = shape_.variant.causal,
                              .window_left = shape_.variant.window_left,
                              .attention_chunk = shape_.variant.attention_chunk,
                              .soft_cap = static_cast<double>(shape_.variant.soft_cap),
                              .sinks = sinks,
                              .draft_tree = rows.tree,
                              .q = q,
                              .k = k,
                              .v = v});
  }

  DType cache_dtype() const {
    return shape_.cache_dtype == DType::u8 ? dtype_ : shape_.cache_dtype;
  }
  /// Of the query's dtype and the cache's, the one with fewer bits of mantissa.
  DType coarser() const {
    return unit_roundoff(dtype_) > unit_roundoff(cache_dtype()) ? dtype_ : cache_dtype();
  }

  static TensorView cache_row(const PagedKvCache& cache, std::int64_t slot) {
    return TensorView::contiguous(cache.slot(slot), cache.format().dtype,
                                  {cache.format().row_elements});
  }

  void make_caches() {
    const std::int64_t k_width = shape_.kv_heads * shape_.qk_dim;
    const std::int64_t v_width = shape_.kv_heads * shape_.v_dim;
    PagedRows::Options options{.format = {cache_dtype(), k_width},
                               .block_size = shape_.block_size,
                               .seed = shape_.seed + 2};
    if (shape_.one_cache) {
      options.format.row_elements += v_width;
      k_rows_ = std::make_unique<PagedRows>(options, owned_);
      k_cache_ = k_rows_->cache().columns(0, k_width);
      v_cache_ = k_rows_->cache().columns(k_width, v_width);
    } else {
      k_rows_ = std::make_unique<PagedRows>(options, owned_);
      options.format.row_elements = v_width;
      options.block_gap_bytes = 160;
      v_rows_ = std::make_unique<PagedRows>(options, owned_);
      k_cache_ = k_rows_->cache();
      v_cache_ = v_rows_->cache();
    }
    for (std::size_t r = 0; r < owned_.size(); ++r) {
      for (std::int64_t j = owned_[r].begin; j < owned_[r].end; ++j) {
        const std::uint64_t seed =
            shape_.seed + 10000 * (r + 1) + 2 * static_cast<std::uint64_t>(j);
        fill_normal(k_row(static_cast<std::int64_t>(r), j), seed);
        fill_normal(v_row(static_cast<std::int64_t>(r), j), seed + 1);
      }
    }
  }

  GqaShape shape_;
  DType dtype_;
  std::vector<std::int32_t> query_start_loc_, cu_k_;
  std::int64_t tokens_;
  float sm_scale_;
  PaddedTensor q_memory_;
  TensorView q_;
  PaddedTensor sinks_, out_, lse_;
  std::vector<OwnedKeys> owned_;
  std::unique_ptr<PagedRows> k_rows_, v_rows_;
  PagedKvCache k_cache_, v_cache_;
};

}  // namespace fovea::test
