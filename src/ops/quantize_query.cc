#include <cmath>

#include "ops/checks.h"
#include "ops/dispatch.h"

namespace fovea {
namespace {

void validate(const QuantizeQueryParams& p) {
  const char* op = kQuantizeQuery.name;
  const Argument q_latent{op, "q_latent"}, q_pe{op, "q_pe"}, out{op, "out"};
  check_view(q_latent, p.q_latent, {{"T"}, {"N"}, {"L"}});
  check_compute_dtype(q_latent, p.q_latent);
  const std::int64_t tokens = p.q_latent.shape[0], heads = p.q_latent.shape[1];
  check_view(q_pe, p.q_pe, {{"T", tokens}, {"N", heads}, {"R"}});
  check_dtype(q_pe, p.q_pe, p.q_latent.dtype);
  check_view(out, p.out,
             {{"T", tokens}, {"N", heads}, {"L + R", p.q_latent.shape[2] + p.q_pe.shape[2]}});
  check_dtype(out, p.out, DType::f8e4m3fn);
  check_unit_inner_stride(out, p.out);
  FOVEA_CHECK(std::isfinite(p.scale) && p.scale > 0.f, invalid_argument,
              "{}: scale is {}; it must be positive and finite", op, p.scale);
  check_data(q_latent, p.q_latent);
  check_data(q_pe, p.q_pe);
  check_output(out, p.out);
  check_disjoint(out, p.out, "q_latent", p.q_latent);
  check_disjoint(out, p.out, "q_pe", p.q_pe);
}

}  // namespace

void quantize_query(const OpContext& ctx, const QuantizeQueryParams& params) {
  check_devices(ctx, kQuantizeQuery.name,
                {{"q_latent", params.q_latent}, {"q_pe", params.q_pe}, {"out", params.out}});
  validate(params);
  if (params.out.numel() == 0) return;
  run(ctx, select(ctx, kQuantizeQuery, params), params);
}

}  // namespace fovea
