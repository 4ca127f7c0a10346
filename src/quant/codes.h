// Codes of single values, in the low bits of a byte.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/float_bits.h"
#include "core/host_device.h"

namespace fovea {

/// Two's complement in `bits` bits.
template <int bits>
struct IntegerCode {
  static constexpr bool kPacked = bits == 4;
  static constexpr bool kHasNan = false;
  static constexpr float kLargest = static_cast<float>((1 << (bits - 1)) - 1);
  FOVEA_HOST_DEVICE static std::uint8_t encode(float x) {
    if (std::isnan(x)) return 0;
    const float low = -kLargest - 1, high = kLargest;
    const int code = static_cast<int>(std::nearbyint(std::clamp(x, low, high)));
    return static_cast<std::uint8_t>(code & ((1 << bits) - 1));
  }
  static constexpr float decode(std::uint8_t code) {
    constexpr int kSign = 1 << (bits - 1);
    return static_cast<float>((code ^ kSign) - kSign);
  }
};

template <class T>
struct FloatCode {
  static constexpr bool kPacked = std::is_same_v<T, Float4E2M1>;
  static constexpr bool kHasNan = !kPacked;
  static constexpr float kLargest = widen(T{FloatFormat<T>::kMaxFinite});
  static constexpr std::uint8_t encode(float x) { return narrow_saturated<T>(x).bits; }
  static constexpr float decode(std::uint8_t code) { return widen(T{code}); }
};

}  // namespace fovea
