#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/rope_angles.h"

namespace fovea {
namespace {

void validate(const RopeParams& p) {
  const char* op = kRope.name;
  const Argument x{op, "x"};
  check_view(x, p.x, {{"T"}, {"N"}, {"R"}});
  check_compute_dtype(x, p.x);
  FOVEA_CHECK(p.x.shape[2] % 2 == 0, invalid_argument,
              "{}: x is {}; R must be even, as channels turn in pairs", op, to_string(p.x));
  check_rope_angles(op, p.angles, p.x.shape[0], p.x.shape[2]);
  check_output(x, p.x);
  check_rope_data(op, p.angles);
  check_disjoint(x, p.x, "positions", p.angles.positions);
  check_disjoint(x, p.x, "cos_sin", p.angles.cos_sin);
}

}  // namespace

void rope(const OpContext& ctx, const RopeParams& params) {
  RopeParams flat = params;
  flat.angles.positions = flat_positions(params.angles);
  check_devices(ctx, kRope.name,
                {{"x", params.x}, {"positions", params.angles.positions},
                 {"cos_sin", params.angles.cos_sin}});
  validate(flat);
  if (flat.x.numel() == 0) return;
  run(ctx, select(ctx, kRope, flat), flat);
}

}  // namespace fovea
