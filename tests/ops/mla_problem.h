// A paged MLA decode problem where every byte that nobody owns is NaN, and its float64 answer.
#pragma once

#include <memory>
#include <vector>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "ops/backend_test.h"
#include "ops/paged_rows.h"
#include "ops/ragged_problem.h"

namespace fovea::test {

/// How the query lies in memory.
enum class QueryLayout {
  separate,      ///< q_latent and q_pe in their own padded tensors.
  concatenated,  ///< Slices of [T, N, L + R].
  head_major,    ///< [N, T, L] seen as [T, N, L], as a batched product leaves it.
  reversed,      ///< Innermost stride -1.
};

struct MlaShape {
  std::int64_t heads = 4;
  std::int64_t latent = 32;
  std::int64_t rope = 8;
  std::int64_t block_size = 16;
  std::vector<std::int32_t> query_lens{1};
  std::vector<std::int32_t> seq_lens{33};
  std::int64_t padding_rows = 0;
  QueryLayout layout = QueryLayout::separate;
  AttentionVariant variant;
  bool sinks = false;
  std::vector<std::uint64_t> draft_tree;  ///< Of all query tokens.
  bool wide_out = false;                  ///< out in f32 whatever the query's dtype.
  double logit_stddev = 3;                ///< As real heads have: some peaked, some flat.
  DType cache_dtype = DType::u8;          ///< u8 stands for the query's.
  std::uint64_t seed = 1;
  bool aligned = false;  ///< Query and output rows begin at multiples of 16 bytes.
};

class MlaProblem {
 public:
  MlaProblem(const MlaShape& shape, DType dtype) : shape_(shape), dtype_(dtype) {
    query_start_loc_ = offsets_of(shape.query_lens);
    tokens_ = query_start_loc_.back() + shape.padding_rows;
    sm_scale_ = static_cast<float>(1 / std::sqrt(static_cast<double>(shape.latent + shape.rope)));
    make_queries();
    make_cache();
    make_outputs();
  }

  const std::vector<std::int32_t>& query_start_loc() const { return query_start_loc_; }
  const TensorView& q_latent() const { return q_latent_; }
  const TensorView& q_pe() const { return q_pe_; }
  const TensorView& out() const { return *out_; }
  const TensorView& lse() const { return *lse_; }
  std::int64_t tokens() const { return tokens_; }

  /// Cached row of a request's key that some query sees.
  TensorView key_row(std::int64_t request, std::int64_t key) const {
    return rows_->row(request, key);
  }

  MlaDecodeParams params() const {
    MlaDecodeParams params;
    params.q_latent = q_latent_;
    params.q_pe = q_pe_;
    params.cache = &rows_->cache();
    params.block_table = rows_->table();
    params.out = *out_;
    params.lse = *lse_;
    params.variant = shape_.variant;
    params.sm_scale = sm_scale_;
    if (shape_.sinks) params.sinks = *sinks_;
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
  void run(const OpContext& ctx, std::int32_t workers = 0, std::int32_t kv_tile = 16) {
    const DecodeSchedule schedule = decode_schedule(ctx, workers, kv_tile);
    MlaDecodeParams planned = params();
    planned.schedule = &schedule;
    run_poisoned(ctx, planned, *out_, *lse_, [&] { mla_decode(ctx, planned); });
  }

  /// Compares the last run with the formulas.
  void check(RowTolerance tolerance) const {
    const auto [out, lse] = expected();
    EXPECT_TRUE(rows_close(out, *out_, tolerance));
    EXPECT_TRUE(values_close(lse, *lse_, kLseAbsolute, kLseRelative));
  }
  void check() const { check(attention_tolerance(coarser())); }

  /// out [T, N, L] and lse [N, T] in float64, padding rows included.
  oracle::AttentionResult expected() const { return expected_over(false); }
  /// The same over the magnitudes of values: what roundings of weights are relative to.
  oracle::AttentionResult expected_magnitudes() const { return expected_over(true); }

 private:
  oracle::AttentionResult expected_over(bool magnitudes) const {
    return put_together(query_start_loc_, tokens_, shape_.heads, shape_.latent,
                        [&](std::size_t r) { return expected_of(r, rows_of(r), magnitudes); });
  }
  RequestRows rows_of(std::size_t r) const {
    return RequestRows::of(r, query_start_loc_, shape_.seq_lens, shape_.draft_tree);
  }

  oracle::AttentionResult expected_of(std::size_t r, const RequestRows& request,
                                      bool magnitudes) const {
    const std::int64_t row = shape_.latent + shape_.rope;
    const std::vector<double> q = request_queries(query_start_loc_[r], request.num_queries);
    // What no query sees is NaN.
    std::vector<double> k(static_cast<std::size_t>(request.num_keys * row), std::nan(""));
    std::vector<double> v(static_cast<std::size_t>(request.num_keys * shape_.latent), std::nan(""));
    for (std::int64_t j = request.first_key(shape_.variant); j < request.num_keys; ++j) {
      const std::vector<double> cached = to_doubles(key_row(static_cast<std::int64_t>(r), j));
      std::copy(cached.begin(), cached.end(), k.begin() + j * row);
      std::copy_n(cached.begin(), shape_.latent, v.begin() + j * shape_.latent);
    }
    for (double& x : v) x = magnitudes ? std::abs(x) : x;
    std::vector<double> sinks;
    if (shape_.sinks) sinks = to_doubles(*sinks_);
    return oracle::attention({.num_queries = request.num_queries,
                              .num_keys = request.num_keys,
                              .num_heads = shape_.heads,
                              .num_kv_heads = 1,
                              .qk_dim = row,
                              .v_dim = shape_.latent,
                              .sm_scale = static_cast<double>(sm_scale_),
                              .causal = shape_.variant.causal,
                              .window_left = shape_.variant.window_left,
                              .attention_chunk = shape_.variant.attention_chunk,
                              .soft_cap = static_cast<double>(shape_.variant.soft_cap),
                              .sinks = sinks,
                              .draft_tree = request.tree,
                              .q = q,
                              .k = k,
                              .v = v});
  }

  /// Of the query's dtype and the cache's, the one with fewer bits of mantissa.
  DType coarser() const {
    const DType cached = rows_->cache().format().dtype;
    return unit_roundoff(dtype_) > unit_roundoff(cached) ? dtype_ : cached;
  }

  std::vector<double> request_queries(std::int64_t first, std::int64_t queries) const {
    const std::vector<double> latent = to_doubles(q_latent_.slice(0, first, first + queries));
    const std::vector<double> rope = to_doubles(q_pe_.slice(0, first, first + queries));
    std::vector<double> q;
    for (std::int64_t i = 0; i < queries * shape_.heads; ++i) {
      q.insert(q.end(), latent.begin() + i * shape_.latent,
               latent.begin() + (i + 1) * shape_.latent);
      q.insert(q.end(), rope.begin() + i * shape_.rope, rope.begin() + (i + 1) * shape_.rope);
    }
    return q;
  }

  void make_queries() {
    const std::int64_t heads = shape_.heads, latent = shape_.latent, rope = shape_.rope;
    switch (shape_.layout) {
      case QueryLayout::separate:
        query_memory_.push_back(padded_rows(dtype_, {tokens_, heads, latent}, shape_.aligned));
        query_memory_.push_back(padded_rows(dtype_, {tokens_, heads, rope}, shape_.aligned));
        q_latent_ = query_memory_[0];
        q_pe_ = query_memory_[1];
        break;
      case QueryLayout::concatenated:
        query_memory_.emplace_back(
            dtype_, std::initializer_list<std::int64_t>{tokens_, heads, latent + rope});
        q_latent_ = query_memory_[0].view().slice(2, 0, latent);
        q_pe_ = query_memory_[0].view().slice(2, latent, latent + rope);
        break;
      case QueryLayout::head_major:
        query_memory_.emplace_back(dtype_,
                                   std::initializer_list<std::int64_t>{heads, tokens_, latent});
        query_memory_.emplace_back(dtype_,
                                   std::initializer_list<std::int64_t>{heads, tokens_, rope});
        q_latent_ = query_memory_[0].view().transpose(0, 1);
        q_pe_ = query_memory_[1].view().transpose(0, 1);
        break;
      case QueryLayout::reversed:
        query_memory_.emplace_back(dtype_,
                                   std::initializer_list<std::int64_t>{tokens_, heads, latent});
        query_memory_.emplace_back(dtype_,
                                   std::initializer_list<std::int64_t>{tokens_, heads, rope});
        q_latent_ = reversed(query_memory_[0]);
        q_pe_ = reversed(query_memory_[1]);
        break;
    }
    // Padding rows stay NaN.
    const std::int64_t actual = query_start_loc_.back();
    fill_normal(q_latent_.slice(0, 0, actual), shape_.seed, shape_.logit_stddev);
    fill_normal(q_pe_.slice(0, 0, actual), shape_.seed + 1, shape_.logit_stddev);
  }

  static TensorView reversed(const TensorView& view) {
    TensorView result = view;
    const auto last = static_cast<std::size_t>(view.ndim - 1);
    const std::int64_t bytes = bytes_of(view.dtype, 1);
    result.data = static_cast<std::byte*>(view.data) + (view.shape[last] - 1) * bytes;
    result.strides[last] = -1;
    return result;
  }

  void make_cache() {
    std::vector<OwnedKeys> owned;
    for (std::size_t r = 0; r < shape_.seq_lens.size(); ++r) {
      owned.push_back({rows_of(r).first_key(shape_.variant), shape_.seq_lens[r]});
    }
    const KvFormat format{shape_.cache_dtype == DType::u8 ? dtype_ : shape_.cache_dtype,
                          shape_.latent + shape_.rope};
    rows_ = std::make_unique<PagedRows>(
        PagedRows::Options{
            .format = format, .block_size = shape_.block_size, .seed = shape_.seed + 2},
        owned);
    for (std::size_t r = 0; r < owned.size(); ++r) {
      for (std::int64_t j = owned[r].begin; j < owned[r].end; ++j) {
        fill_normal(key_row(static_cast<std::int64_t>(r), j),
                    shape_.seed + 1000 * (r + 1) + static_cast<std::uint64_t>(j));
      }
    }
  }

  void make_outputs() {
    out_ = std::make_unique<PaddedTensor>(padded_rows(shape_.wide_out ? DType::f32 : dtype_,
                                                      {tokens_, shape_.heads, shape_.latent},
                                                      shape_.aligned));
    lse_ = std::make_unique<PaddedTensor>(
        DType::f32, std::initializer_list<std::int64_t>{shape_.heads, tokens_});
    sinks_ = std::make_unique<PaddedTensor>(DType::f32,
                                            std::initializer_list<std::int64_t>{shape_.heads});
    fill_normal(*sinks_, shape_.seed + 3, 2);
  }

  MlaShape shape_;
  DType dtype_;
  std::vector<std::int32_t> query_start_loc_;
  std::int64_t tokens_ = 0;
  float sm_scale_ = 0;
  std::vector<PaddedTensor> query_memory_;
  TensorView q_latent_, q_pe_;
  std::unique_ptr<PagedRows> rows_;
  std::unique_ptr<PaddedTensor> out_, lse_, sinks_;
};

}  // namespace fovea::test
