// Turning rows by the angles of one token.
#pragma once

#include <array>
#include <cstdint>

#include "backends/cpu/rows.h"
#include "fovea/ops.h"

namespace fovea::cpu {

/// Of all channel pairs; with sections each pair takes the angle of its own axis.
class TokenAngles {
 public:
  TokenAngles(const RopeAngles& angles, std::int64_t token);

  /// Turns the first R channels of a row.
  void rotate(const Kernels& kernels, const Row& x) const;

 private:
  float cos(std::int64_t pair) const { return rows_[axis_of(pair)][pair]; }
  float sin(std::int64_t pair) const { return rows_[axis_of(pair)][half_ + pair]; }
  std::size_t axis_of(std::int64_t pair) const;
  void rotate_pairs(const Row& x) const;

  const RopeAngles& angles_;
  std::int64_t half_;                   ///< R / 2
  std::array<const float*, 3> rows_{};  ///< Of cos_sin, for each axis.
};

}  // namespace fovea::cpu
