#include "ops/rope_angles.h"

#include "core/check.h"
#include "ops/checks.h"

namespace fovea {

TensorView flat_positions(const RopeAngles& angles) {
  const TensorView& positions = angles.positions;
  const bool flat = positions.ndim != 2 || positions.shape[0] != 1 || angles.sections.multi_axis();
  return flat ? positions : positions.select(0, 0);
}

void check_rope_angles(const char* op, const RopeAngles& angles, std::int64_t tokens,
                       std::int64_t rope_dim) {
  const Argument positions{op, "positions"}, cos_sin{op, "cos_sin"};
  const MropeSections& sections = angles.sections;
  if (sections.multi_axis()) {
    const auto& pairs = sections.pairs;
    FOVEA_CHECK(std::ranges::min(pairs) >= 0 && pairs[0] + pairs[1] + pairs[2] == rope_dim / 2,
                invalid_argument,
                "{}: sections.pairs are {}, {} and {}; they must not be negative and add up to "
                "R / 2 = {}",
                op, pairs[0], pairs[1], pairs[2], rope_dim / 2);
    check_view(positions, angles.positions, {{"3", 3}, {"T", tokens}});
  } else {
    FOVEA_CHECK(!sections.interleaved, invalid_argument,
                "{}: sections.interleaved is set without sections.pairs; it must come with them",
                op);
    check_view(positions, angles.positions, {{"T", tokens}});
  }
  check_index_dtype(positions, angles.positions);
  check_view(cos_sin, angles.cos_sin, {{"max_position"}, {"R", rope_dim}});
  check_dtype(cos_sin, angles.cos_sin, DType::f32);
  FOVEA_CHECK(angles.cos_sin.is_contiguous(), invalid_argument,
              "{}: cos_sin is {}; it must be contiguous", op, to_string(angles.cos_sin));
  FOVEA_CHECK(angles.pairing == RopePairing::neox || angles.pairing == RopePairing::interleaved,
              invalid_argument, "{}: pairing is {}; it must be RopePairing::neox or interleaved",
              op, static_cast<int>(angles.pairing));
}

void check_rope_data(const char* op, const RopeAngles& angles) {
  check_data({op, "positions"}, angles.positions);
  check_data({op, "cos_sin"}, angles.cos_sin);
  if (!is_on_host(angles.positions)) return;
  const std::int64_t axes = angles.sections.multi_axis() ? 3 : 1;
  const std::int64_t tokens = angles.positions.shape[static_cast<std::size_t>(axes > 1)];
  for (std::int64_t axis = 0; axis < axes; ++axis) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t position = position_of(angles, t, axis);
      FOVEA_CHECK(position >= 0 && position < angles.cos_sin.shape[0], invalid_argument,
                  "{}: positions[{}] is {}; it must be in [0, {}), the rows of cos_sin", op,
                  axis * tokens + t, position, angles.cos_sin.shape[0]);
    }
  }
}

void check_no_angles(const char* op, const RopeAngles& angles) {
  FOVEA_CHECK(!angles.positions && !angles.sections.multi_axis(), invalid_argument,
              "{}: cos_sin is absent; it must go with rope.positions and rope.sections", op);
}

}  // namespace fovea
