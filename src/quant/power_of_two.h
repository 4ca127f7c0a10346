// Scales that are powers of two.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace fovea {

/// The smallest power of two that is not below `scale`, which is positive and finite, or NaN.
FOVEA_HOST_DEVICE inline float power_of_two_above(float scale) {
  int exponent;
  const float fraction = std::frexp(scale, &exponent);
  return std::isnan(scale) || fraction == 0.5f ? scale : std::ldexp(1.f, exponent);
}

}  // namespace fovea
