#include <cmath>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/overlap.h"

namespace fovea {
namespace {

void validate(const AddResidualParams& p) {
  const char* op = kAddResidual.name;
  const Argument x{op, "x"}, y{op, "y"};
  check_view(x, p.x, {{"T"}, {"D"}});
  check_compute_dtype(x, p.x);
  check_unit_inner_stride(x, p.x);
  check_view(y, p.y, {{"T", p.x.shape[0]}, {"D", p.x.shape[1]}});
  check_dtype(y, p.y, p.x.dtype);
  check_unit_inner_stride(y, p.y);
  FOVEA_CHECK(std::isfinite(p.scale), invalid_argument, "{}: scale is {}; it must be finite", op,
              p.scale);

  check_data(y, p.y);
  check_output(x, p.x);
  check_disjoint(x, p.x, "y", p.y);
}

}  // namespace

void add_residual(const OpContext& ctx, const AddResidualParams& params) {
  check_devices(ctx, kAddResidual.name, {{"x", params.x}, {"y", params.y}});
  validate(params);
  if (params.x.numel() == 0) return;
  run(ctx, select(ctx, kAddResidual, params), params);
}

}  // namespace fovea
