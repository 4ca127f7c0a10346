#include "quant/mxfp4.h"

#include <algorithm>
#include <cmath>

#include "core/float_bits.h"
#include "fovea/quant.h"

namespace fovea {

Float8E8M0 mxfp4_scale(std::span<const float> group) {
  constexpr int kBias = 127, kLargest = 127, kLargestCodeExponent = 2;
  float amax = 0;
  for (const float value : group) {
    if (std::isnan(value)) return {0xff};
    if (std::isfinite(value)) amax = std::max(amax, std::abs(value));
  }
  if (amax == 0) return {0};
  int exponent;
  const float fraction = std::frexp(amax, &exponent);  // In [0.5, 1).
  if (fraction < 0.875f) --exponent;
  exponent = std::clamp(exponent - kLargestCodeExponent, -kBias, kLargest);
  return {static_cast<std::uint8_t>(exponent + kBias)};
}

Float8E8M0 encode_mxfp4_group(std::span<const float> group, std::span<std::byte> codes) {
  const Float8E8M0 scale = mxfp4_scale(group);
  const float step = widen(scale);
  if (std::isnan(step)) {
    std::fill(codes.begin(), codes.end(), std::byte{0});
  } else {
    quantize_group(DType::f4e2m1, group, step, codes);
  }
  return scale;
}

}  // namespace fovea
