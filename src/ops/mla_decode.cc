#include <cmath>

#include "ops/checks.h"
#include "ops/decode_schedule.h"
#include "ops/dispatch.h"

namespace fovea {
namespace {

const char* const kName = kMlaDecode.name;

/// What workspace_bytes needs: everything but the data.
void validate_shapes(const MlaDecodeParams& p) {
  const Argument q_latent{kName, "q_latent"}, q_pe{kName, "q_pe"};
  const Argument out{kName, "out"}, lse{kName, "lse"};
  check_view(q_latent, p.q_latent, {{"T"}, {"N"}, {"L"}});
  const bool is_fp8 = p.q_latent.dtype == DType::f8e4m3fn;
  if (!is_fp8) check_compute_dtype(q_latent, p.q_latent);
  FOVEA_CHECK(is_fp8 ? std::isfinite(p.q_scale) && p.q_scale > 0.f : p.q_scale == 0.f,
              invalid_argument, "{}: q_scale is {} with queries in {}; it must be {}", kName,
              p.q_scale, name_of(p.q_latent.dtype),
              is_fp8 ? "positive and finite" : "0: these have no scale");
  const std::int64_t tokens = p.q_latent.shape[0];
  const std::int64_t heads = p.q_latent.shape[1];
  const std::int64_t latent = p.q_latent.shape[2];
  FOVEA_CHECK(heads > 0 && latent > 0, invalid_argument,
              "{}: q_latent is {}; N and L must be positive", kName, to_string(p.q_latent));
  check_view(q_pe, p.q_pe, {{"T", tokens}, {"N", heads}, {"R"}});
  check_dtype(q_pe, p.q_pe, p.q_latent.dtype);
  check_latent_cache(kName, p.cache, latent, p.q_pe.shape[2]);
  check_view(out, p.out, {{"T", tokens}, {"N", heads}, {"L", latent}});
  if (is_fp8) {
    check_compute_dtype(out, p.out);
  } else {
    check_dtype_or_f32(out, p.out, p.q_latent.dtype);
  }
  if (p.lse) {
    check_view(lse, p.lse, {{"N", heads}, {"T", tokens}});
    check_dtype(lse, p.lse, DType::f32);
  }
  check_sm_scale(kName, p.sm_scale);
  if (p.sinks) check_sinks({kName, "sinks"}, p.sinks, heads);
  check_decode_schedule(kName, p.schedule, p.variant, {kName, "the rows of q_latent"}, tokens);
}

void validate_data(const MlaDecodeParams& p) {
  const Argument out{kName, "out"}, lse{kName, "lse"};
  check_data({kName, "q_latent"}, p.q_latent);
  check_data({kName, "q_pe"}, p.q_pe);
  check_output(out, p.out);
  if (p.lse) check_output(lse, p.lse);
  const TensorView rows = bytes_of_rows(*p.cache);
  check_disjoint(out, p.out, "q_latent", p.q_latent);
  check_disjoint(out, p.out, "q_pe", p.q_pe);
  check_disjoint(out, p.out, "cache", rows);
  check_disjoint(lse, p.lse, "q_latent", p.q_latent);
  check_disjoint(lse, p.lse, "q_pe", p.q_pe);
  check_disjoint(lse, p.lse, "cache", rows);
  check_disjoint(lse, p.lse, "out", p.out);

  if (p.sinks) {
    check_data({kName, "sinks"}, p.sinks);
    check_disjoint(out, p.out, "sinks", p.sinks);
    check_disjoint(lse, p.lse, "sinks", p.sinks);
  }
  check_decode_blocks(kName, *p.schedule, p.variant, p.block_table, *p.cache);
}

}  // namespace

std::int64_t workspace_bytes(const OpContext& ctx, const MlaDecodeParams& params) {
  validate_shapes(params);
  return scratch_bytes(ctx, select(ctx, kMlaDecode, params), params);
}

void prepare(const OpContext& ctx, const MlaDecodeParams& params) {
  validate_shapes(params);
  check_table_device(ctx, kName, params.block_table);
  prepare_with(ctx, kMlaDecode, params);
}

void mla_decode(const OpContext& ctx, const MlaDecodeParams& params) {
  check_devices(ctx, kName,
                {{"q_latent", params.q_latent}, {"q_pe", params.q_pe}, {"cache", params.cache},
                 {"out", params.out}, {"lse", params.lse}, {"sinks", params.sinks}});
  validate_shapes(params);
  check_table_device(ctx, kName, params.block_table);
  validate_data(params);
  const auto& implementation = select_with_scratch(ctx, kMlaDecode, params);
  if (params.schedule->query_start_loc.back() > 0) run(ctx, implementation, params);
  write_padding_rows(ctx, params.schedule->query_start_loc.back(), params.out, params.lse);
}

void mla_decode_once(const OpContext& ctx, const MlaDecodeParams& params,
                     std::span<const std::int32_t> query_start_loc,
                     std::span<const std::int32_t> seq_lens) {
  const DecodeSchedule schedule =
      schedule_decode(query_start_loc, seq_lens, ctx.plan_target, params.variant);
  MlaDecodeParams planned = params;
  planned.schedule = &schedule;
  ctx.workspace->reserve(workspace_bytes(ctx, planned));
  mla_decode(ctx, planned);
}

}  // namespace fovea
