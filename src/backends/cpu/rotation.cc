#include "backends/cpu/rotation.h"

#include "ops/rope_angles.h"

namespace fovea::cpu {

TokenAngles::TokenAngles(const RopeAngles& angles, std::int64_t token)
    : angles_(angles), half_(angles.cos_sin.shape[1] / 2) {
  const std::int64_t axes = angles.sections.multi_axis() ? 3 : 1;
  for (std::int64_t axis = 0; axis < axes; ++axis) {
    rows_[static_cast<std::size_t>(axis)] =
        angles.cos_sin.ptr<float>({position_of(angles, token, axis), 0});
  }
}

std::size_t TokenAngles::axis_of(std::int64_t pair) const {
  if (!angles_.sections.multi_axis()) return 0;
  return static_cast<std::size_t>(mrope_axis(angles_.sections, pair));
}

void TokenAngles::rotate(const Kernels& kernels, const Row& x) const {
  if (x.stride != 1 || angles_.sections.multi_axis()) return rotate_pairs(x);
  const auto rotate = kernels.rotate[static_cast<std::size_t>(x.dtype)];
  rotate(x.data, rows_[0], rows_[0] + half_, half_, angles_.pairing == RopePairing::interleaved);
}

/// Channels that do not lie next to each other, or angles that do not.
void TokenAngles::rotate_pairs(const Row& x) const {
  const bool interleaved = angles_.pairing == RopePairing::interleaved;
  for (std::int64_t i = 0; i < half_; ++i) {
    const std::int64_t first = interleaved ? 2 * i : i;
    const std::int64_t second = interleaved ? 2 * i + 1 : i + half_;
    const float a = load_element(x, first);
    const float b = load_element(x, second);
    store_element(x, first, a * cos(i) - b * sin(i));
    store_element(x, second, b * cos(i) + a * sin(i));
  }
}

}  // namespace fovea::cpu
