#include <limits>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/paged_kv.h"
#include "plan/extents.h"

namespace fovea {
namespace {

const char* const kName = kAttentionPrefill.name;

void validate_schedule(const AttentionPrefillParams& p) {
  FOVEA_CHECK(p.schedule != nullptr, invalid_argument,
              "{}: schedule is null; it must come from schedule_prefill (attention_prefill_once "
              "plans for you)",
              kName);
  const PrefillSchedule& schedule = *p.schedule;
  check_offsets({kName, "schedule->cu_seqlens_q"}, schedule.cu_seqlens_q, p.q.shape[0],
                "the rows of q");
  // Paged keys have no rows of their own: the block table is checked instead.
  const bool paged = p.paged.k_cache != nullptr;
  check_offsets({kName, "schedule->cu_seqlens_k"}, schedule.cu_seqlens_k,
                paged ? std::numeric_limits<std::int32_t>::max() : p.k.shape[0],
                paged ? "2^31 - 1" : "the rows of k");
  FOVEA_CHECK(schedule.cu_seqlens_q.size() == schedule.cu_seqlens_k.size(), invalid_argument,
              "{}: schedule->cu_seqlens_q has {} entries; it must have as many as cu_seqlens_k, {}",
              kName, schedule.cu_seqlens_q.size(), schedule.cu_seqlens_k.size());
  const std::size_t num_requests = schedule.cu_seqlens_q.size() - 1;
  FOVEA_CHECK(schedule.first_query.size() == schedule.first_key.size() &&
                  (schedule.first_query.empty() || schedule.first_query.size() == num_requests),
              invalid_argument,
              "{}: schedule has {} first_query and {} first_key; it must have one of each of {} "
              "requests, or none",
              kName, schedule.first_query.size(), schedule.first_key.size(), num_requests);
  for (std::size_t i = 0; i < num_requests; ++i) {
    const std::int32_t query_len = schedule.cu_seqlens_q[i + 1] - schedule.cu_seqlens_q[i];
    const std::int32_t seq_len = schedule.cu_seqlens_k[i + 1] - schedule.cu_seqlens_k[i];
    FOVEA_CHECK(query_len <= schedule.max_query_len && seq_len <= schedule.max_seq_len,
                invalid_argument,
                "{}: schedule request {} has {} queries and {} keys; max_query_len = {} and "
                "max_seq_len = {} must cover them",
                kName, i, query_len, seq_len, schedule.max_query_len, schedule.max_seq_len);
  }
  // Tiles must cover every query row once: a row without a tile would stay unwritten.
  std::int64_t rows = 0;
  const auto requests = static_cast<std::int64_t>(schedule.cu_seqlens_q.size()) - 1;
  for (const PrefillTile& tile : schedule.tiles) {
    const bool in_range = tile.request >= 0 && tile.request < requests;
    const auto r = static_cast<std::size_t>(in_range ? tile.request : 0);
    FOVEA_CHECK(in_range && tile.query_begin >= 0 && tile.query_begin <= tile.query_end &&
                    tile.query_end <= schedule.cu_seqlens_q[r + 1] - schedule.cu_seqlens_q[r],
                invalid_argument,
                "{}: schedule tile has rows [{}, {}) of request {}; they must be rows of one of {} "
                "requests",
                kName, tile.query_begin, tile.query_end, tile.request, requests);
    rows += tile.query_end - tile.query_begin;
  }
  FOVEA_CHECK(rows == schedule.cu_seqlens_q.back(), invalid_argument,
              "{}: schedule tiles have {} rows; they must cover the {} query rows once", kName,
              rows, schedule.cu_seqlens_q.back());
}

void validate_contiguous_kv(const AttentionPrefillParams& p) {
  const Argument k{kName, "k"}, k_pe{kName, "k_pe"}, v{kName, "v"};
  check_view(k, p.k, {{"Tk"}, {"Hk"}, {p.k_pe ? "Dk - R" : "Dk"}});
  const std::int64_t rope_dim = p.k_pe && p.k_pe.ndim == 2 ? p.k_pe.shape[1] : 0;
  const std::int64_t heads = p.q.shape[1];
  const std::int64_t kv_heads = p.k.shape[1];
  check_view(k, p.k, {{"Tk"}, {"Hk"}, {p.k_pe ? "Dk - R" : "Dk", p.q.shape[2] - rope_dim}});
  check_dtype(k, p.k, p.q.dtype);
  FOVEA_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, invalid_argument,
              "{}: q has N = {} heads and k has Hk = {}; N must be a positive multiple of Hk",
              kName, heads, kv_heads);
  if (p.k_pe) {
    check_view(k_pe, p.k_pe, {{"Tk", p.k.shape[0]}, {"R"}});
    check_dtype(k_pe, p.k_pe, p.q.dtype);
  }
  check_view(v, p.v, {{"Tk", p.k.shape[0]}, {"Hk", kv_heads}, {"Dv"}});
  check_dtype(v, p.v, p.q.dtype);
}

/// Beside paged keys, k and v are the query rows' own.
void validate_new_tokens(const AttentionPrefillParams& p) {
  FOVEA_CHECK(p.k_pe.ndim == 0, invalid_argument,
              "{}: k_pe is {} beside paged keys; it must be absent", kName, to_string(p.k_pe));
  FOVEA_CHECK((p.k.ndim == 0) == (p.v.ndim == 0), invalid_argument,
              "{}: k is {} and v is {} beside paged keys; both must be there or neither", kName,
              to_string(p.k), to_string(p.v));
  if (p.k.ndim == 0) return;
  const Argument k{kName, "k"}, v{kName, "v"};
  check_view(k, p.k, {{"Tq", p.q.shape[0]}, {"Hk", p.paged.num_kv_heads}, {"Dk", p.q.shape[2]}});
  check_dtype(k, p.k, p.q.dtype);
  check_view(v, p.v, {{"Tq", p.q.shape[0]}, {"Hk", p.paged.num_kv_heads}, {"Dv", p.out.shape[2]}});
  check_dtype(v, p.v, p.q.dtype);
}

/// What workspace_bytes needs: everything but the data.
void validate_shapes(const AttentionPrefillParams& p) {
  const Argument q{kName, "q"}, out{kName, "out"}, lse{kName, "lse"};
  check_view(q, p.q, {{"Tq"}, {"N"}, {"Dk"}});
  check_compute_dtype(q, p.q);
  const std::int64_t heads = p.q.shape[1];
  if (p.paged.k_cache != nullptr) {
    check_view(out, p.out, {{"Tq", p.q.shape[0]}, {"N", heads}, {"Dv"}});
    check_paged_kv(kName, p.paged, p.q, p.out);
    validate_new_tokens(p);
  } else {
    validate_contiguous_kv(p);
    check_view(out, p.out, {{"Tq", p.q.shape[0]}, {"N", heads}, {"Dv", p.v.shape[2]}});
  }
  check_dtype_or_f32(out, p.out, p.q.dtype);
  if (p.lse) {
    check_view(lse, p.lse, {{"N", heads}, {"Tq", p.q.shape[0]}});
    check_dtype(lse, p.lse, DType::f32);
  }
  check_sm_scale(kName, p.sm_scale);
  check_variant(kName, p.variant);
  if (p.sinks) check_sinks({kName, "sinks"}, p.sinks, heads);
  validate_schedule(p);
}

void validate_blocks(const AttentionPrefillParams& p) {
  const PrefillSchedule& schedule = *p.schedule;
  const std::int64_t requests = std::ssize(schedule.cu_seqlens_q) - 1;
  check_block_table(kName, p.paged.block_table, requests);
  for (std::int32_t r = 0; r < requests; ++r) {
    const SequenceExtent extent = extent_of(schedule, r);
    if (extent.num_queries == 0) continue;
    FOVEA_CHECK(
        p.k.ndim == 0 || extent.num_queries <= extent.num_keys, invalid_argument,
        "{}: schedule request {} has {} queries and {} keys; with k and v it must have a key "
        "for each query",
        kName, r, extent.num_queries, extent.num_keys);
    KeyInterval keys = visible_to_any(p.variant, {0, extent.num_queries}, extent);
    if (p.k.ndim > 0) keys.end = extent.num_keys - extent.num_queries;
    check_block_row(kName, p.paged.block_table, *p.paged.k_cache, r, keys.begin, keys.end);
  }
}

void validate_data(const AttentionPrefillParams& p) {
  const struct {
    const char* name;
    const TensorView& view;
  } inputs[] = {{"q", p.q}, {"k", p.k}, {"k_pe", p.k_pe}, {"v", p.v}, {"sinks", p.sinks}};
  const Argument out{kName, "out"}, lse{kName, "lse"};
  check_output(out, p.out);
  if (p.lse) check_output(lse, p.lse);
  for (const auto& [name, view] : inputs) {
    if (view.ndim == 0) continue;
    check_data({kName, name}, view);
    check_disjoint(out, p.out, name, view);
    check_disjoint(lse, p.lse, name, view);
  }
  check_disjoint(lse, p.lse, "out", p.out);
  if (p.paged.k_cache == nullptr) return;
  check_outside_caches(out, p.out, p.paged);
  check_outside_caches(lse, p.lse, p.paged);
  validate_blocks(p);
}

}  // namespace

std::int64_t workspace_bytes(const OpContext& ctx, const AttentionPrefillParams& params) {
  validate_shapes(params);
  return scratch_bytes(ctx, select(ctx, kAttentionPrefill, params), params);
}

void attention_prefill(const OpContext& ctx, const AttentionPrefillParams& params) {
  check_devices(ctx, kName,
                {{"q", params.q}, {"k", params.k}, {"k_pe", params.k_pe}, {"v", params.v},
                 {"out", params.out}, {"lse", params.lse}, {"sinks", params.sinks},
                 {"k_cache", params.paged.k_cache}, {"v_cache", params.paged.v_cache}});
  validate_shapes(params);
  validate_data(params);
  const auto& implementation = select_with_scratch(ctx, kAttentionPrefill, params);
  if (params.schedule->cu_seqlens_q.back() > 0) run(ctx, implementation, params);
  write_padding_rows(ctx, params.schedule->cu_seqlens_q.back(), params.out, params.lse);
}

void attention_prefill_once(const OpContext& ctx, const AttentionPrefillParams& params,
                            std::span<const std::int32_t> cu_seqlens_q,
                            std::span<const std::int32_t> cu_seqlens_k) {
  const PrefillSchedule schedule = schedule_prefill(
      cu_seqlens_q, cu_seqlens_k, ctx.plan_target.prefill_query_tile, params.variant);
  AttentionPrefillParams planned = params;
  planned.schedule = &schedule;
  ctx.workspace->reserve(workspace_bytes(ctx, planned));
  attention_prefill(ctx, planned);
}

}  // namespace fovea
