#include "quant/output_codec.h"

#include <algorithm>
#include <cmath>

#include "core/float_bits.h"
#include "fovea/quant.h"
#include "quant/power_of_two.h"

namespace fovea {
namespace {

/// Of the finite values, as group_scale says; NaN when a value is.
float largest_magnitude(std::span<const float> values) {
  float amax = 0;
  for (const float value : values) {
    if (std::isnan(value)) return value;
    if (std::isfinite(value)) amax = std::max(amax, std::abs(value));
  }
  return amax;
}

}  // namespace

float fp8_group_scale(std::span<const float> group, bool power_of_two) {
  const float amax = largest_magnitude(group);
  if (std::isnan(amax)) return amax;
  const float scale = std::max(amax, kSmallestAmax) / largest_code_value(DType::f8e4m3fn);
  return power_of_two ? power_of_two_above(scale) : scale;
}

std::uint8_t encode_nvfp4_group(std::span<const float> group, float scale,
                                std::span<std::byte> codes) {
  const float amax = largest_magnitude(group);
  const auto group_scale =
      narrow_saturated<Float8E4M3FN>(amax / largest_code_value(DType::f4e2m1) / scale);
  const float step = widen(group_scale) * scale;
  // Too small for any scale: all codes are zero. A NaN shows in the group's scale.
  if (step == 0 || std::isnan(step)) {
    std::fill(codes.begin(), codes.end(), std::byte{0});
  } else {
    quantize_group(DType::f4e2m1, group, step, codes);
  }
  return group_scale.bits;
}

}  // namespace fovea
