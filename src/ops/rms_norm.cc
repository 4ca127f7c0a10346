#include <cmath>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/overlap.h"

namespace fovea {
namespace {

void validate(const RmsNormParams& p) {
  const char* op = kRmsNorm.name;
  const Argument x{op, "x"}, weight{op, "weight"}, out{op, "out"};
  check_view(x, p.x, {{"T"}, {"D"}});
  check_compute_dtype(x, p.x);
  check_unit_inner_stride(x, p.x);
  check_view(weight, p.weight, {{"D", p.x.shape[1]}});
  check_compute_dtype(weight, p.weight);
  check_view(out, p.out, {{"T", p.x.shape[0]}, {"D", p.x.shape[1]}});
  check_dtype(out, p.out, p.x.dtype);
  check_unit_inner_stride(out, p.out);
  FOVEA_CHECK(std::isfinite(p.eps) && p.eps >= 0.f, invalid_argument,
              "{}: eps is {}; it must be finite and not negative", op, p.eps);

  check_data(x, p.x);
  check_data(weight, p.weight);
  check_output(out, p.out);
  check_disjoint(out, p.out, "weight", p.weight);
  if (!is_same_view(p.out, p.x)) check_disjoint(out, p.out, "x", p.x);
}

}  // namespace

void rms_norm(const OpContext& ctx, const RmsNormParams& params) {
  check_devices(ctx, kRmsNorm.name,
                {{"x", params.x}, {"weight", params.weight}, {"out", params.out}});
  validate(params);
  if (params.x.numel() == 0) return;
  run(ctx, select(ctx, kRmsNorm, params), params);
}

}  // namespace fovea
