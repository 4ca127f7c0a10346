// Positions and angles, as the ops check them and backends read them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fovea/ops.h"
#include "ops/index_view.h"

namespace fovea {

/// [1, T] as [T]; [3, T] stays.
TensorView flat_positions(const RopeAngles& angles);

/// Shapes and dtypes, for `tokens` tokens and rope_dim channels, an even number. Positions are
/// flat.
void check_rope_angles(const char* op, const RopeAngles& angles, std::int64_t tokens,
                       std::int64_t rope_dim);
/// Elements are there, and every position (of those on the host) has a row of cos_sin.
void check_rope_data(const char* op, const RopeAngles& angles);

/// Nothing of `angles`, whose cos_sin is absent, is there.
void check_no_angles(const char* op, const RopeAngles& angles);

/// The axis that channel pair `pair` turns by.
constexpr std::int64_t mrope_axis(const MropeSections& sections, std::int64_t pair) {
  if (sections.interleaved) {
    const std::int64_t axis = pair % 3;
    return pair < 3 * sections.pairs[static_cast<std::size_t>(axis)] ? axis : 0;
  }
  if (pair < sections.pairs[0]) return 0;
  return pair < sections.pairs[0] + sections.pairs[1] ? 1 : 2;
}

/// Position of token `token` on `axis`.
inline std::int64_t position_of(const RopeAngles& angles, std::int64_t token, std::int64_t axis) {
  return angles.sections.multi_axis() ? index_at(angles.positions.select(0, axis), token)
                                      : index_at(angles.positions, token);
}

}  // namespace fovea
