#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/index_view.h"

namespace fovea {
namespace {

/// [1, T] as [T].
TensorView flat_positions(const TensorView& positions) {
  return positions.ndim == 2 && positions.shape[0] == 1 ? positions.select(0, 0) : positions;
}

void validate(const RopeParams& p) {
  const char* op = kRope.name;
  const Argument x{op, "x"}, positions{op, "positions"}, cos_sin{op, "cos_sin"};
  check_view(x, p.x, {{"T"}, {"N"}, {"R"}});
  check_compute_dtype(x, p.x);
  const std::int64_t rope_dim = p.x.shape[2];
  FOVEA_CHECK(rope_dim % 2 == 0, invalid_argument,
              "{}: x is {}; R must be even, as channels turn in pairs", op, to_string(p.x));
  check_view(positions, p.positions, {{"T", p.x.shape[0]}});
  check_index_dtype(positions, p.positions);
  check_view(cos_sin, p.cos_sin, {{"max_position"}, {"R", rope_dim}});
  check_dtype(cos_sin, p.cos_sin, DType::f32);
  FOVEA_CHECK(p.cos_sin.is_contiguous(), invalid_argument,
              "{}: cos_sin is {}; it must be contiguous", op, to_string(p.cos_sin));
  FOVEA_CHECK(p.pairing == RopePairing::neox || p.pairing == RopePairing::interleaved,
              invalid_argument, "{}: pairing is {}; it must be RopePairing::neox or interleaved",
              op, static_cast<int>(p.pairing));

  check_output(x, p.x);
  check_data(positions, p.positions);
  check_data(cos_sin, p.cos_sin);
  check_disjoint(x, p.x, "positions", p.positions);
  check_disjoint(x, p.x, "cos_sin", p.cos_sin);
  for (std::int64_t t = 0; t < p.x.shape[0]; ++t) {
    const std::int64_t position = index_at(p.positions, t);
    FOVEA_CHECK(position >= 0 && position < p.cos_sin.shape[0], invalid_argument,
                "{}: positions[{}] is {}; it must be in [0, {}), the rows of cos_sin", op, t,
                position, p.cos_sin.shape[0]);
  }
}

}  // namespace

void rope(const OpContext& ctx, const RopeParams& params) {
  RopeParams flat = params;
  flat.positions = flat_positions(params.positions);
  validate(flat);
  if (flat.x.numel() == 0) return;
  select(ctx, kRope, flat).run(ctx, flat);
}

}  // namespace fovea
