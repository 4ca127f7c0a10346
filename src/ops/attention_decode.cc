#include "ops/checks.h"
#include "ops/decode_schedule.h"
#include "ops/dispatch.h"
#include "ops/paged_kv.h"

namespace fovea {
namespace {

const char* const kName = kAttentionDecode.name;

/// What workspace_bytes needs: everything but the data.
void validate_shapes(const AttentionDecodeParams& p) {
  const Argument q{kName, "q"}, out{kName, "out"}, lse{kName, "lse"};
  check_view(q, p.q, {{"T"}, {"N"}, {"Dk"}});
  check_compute_dtype(q, p.q);
  const std::int64_t tokens = p.q.shape[0];
  const std::int64_t heads = p.q.shape[1];
  check_view(out, p.out, {{"T", tokens}, {"N", heads}, {"Dv"}});
  check_dtype_or_f32(out, p.out, p.q.dtype);
  check_paged_kv(kName, p.kv, p.q, p.out);
  if (p.lse) {
    check_view(lse, p.lse, {{"N", heads}, {"T", tokens}});
    check_dtype(lse, p.lse, DType::f32);
  }
  check_sm_scale(kName, p.sm_scale);
  if (p.sinks) check_sinks({kName, "sinks"}, p.sinks, heads);
  check_decode_schedule(kName, p.schedule, p.variant, {kName, "the rows of q"}, tokens);
}

void validate_data(const AttentionDecodeParams& p) {
  const Argument out{kName, "out"}, lse{kName, "lse"};
  check_data({kName, "q"}, p.q);
  check_output(out, p.out);
  if (p.lse) check_output(lse, p.lse);
  check_disjoint(out, p.out, "q", p.q);
  check_disjoint(lse, p.lse, "q", p.q);
  check_disjoint(lse, p.lse, "out", p.out);
  check_outside_caches(out, p.out, p.kv);
  check_outside_caches(lse, p.lse, p.kv);
  if (p.sinks) {
    check_data({kName, "sinks"}, p.sinks);
    check_disjoint(out, p.out, "sinks", p.sinks);
    check_disjoint(lse, p.lse, "sinks", p.sinks);
  }
  check_decode_blocks(kName, *p.schedule, p.variant, p.kv.block_table, *p.kv.k_cache);
}

}  // namespace

std::int64_t workspace_bytes(const OpContext& ctx, const AttentionDecodeParams& params) {
  validate_shapes(params);
  return scratch_bytes(ctx, select(ctx, kAttentionDecode, params), params);
}

void prepare(const OpContext& ctx, const AttentionDecodeParams& params) {
  validate_shapes(params);
  check_table_device(ctx, kName, params.kv.block_table);
  prepare_with(ctx, kAttentionDecode, params);
}

void attention_decode(const OpContext& ctx, const AttentionDecodeParams& params) {
  check_devices(ctx, kName,
                {{"q", params.q}, {"out", params.out}, {"lse", params.lse}, {"sinks", params.sinks},
                 {"k_cache", params.kv.k_cache}, {"v_cache", params.kv.v_cache}});
  validate_shapes(params);
  check_table_device(ctx, kName, params.kv.block_table);
  validate_data(params);
  const auto& implementation = select_with_scratch(ctx, kAttentionDecode, params);
  if (params.schedule->query_start_loc.back() > 0) run(ctx, implementation, params);
  write_padding_rows(ctx, params.schedule->query_start_loc.back(), params.out, params.lse);
}

void attention_decode_once(const OpContext& ctx, const AttentionDecodeParams& params,
                           std::span<const std::int32_t> query_start_loc,
                           std::span<const std::int32_t> seq_lens) {
  const DecodeSchedule schedule =
      schedule_decode(query_start_loc, seq_lens, ctx.plan_target, params.variant);
  AttentionDecodeParams planned = params;
  planned.schedule = &schedule;
  ctx.workspace->reserve(workspace_bytes(ctx, planned));
  attention_decode(ctx, planned);
}

}  // namespace fovea
