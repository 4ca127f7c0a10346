// Values that are not finite: with a masked weight of zero they would spoil a product.
#pragma once

#include "backends/cuda/sm90/arithmetic.cuh"

namespace fovea::cuda {

/// The sign's place of each element of a word that is NaN or infinite; else 0.
template <typename T>
__device__ __forceinline__ std::uint32_t not_finite(std::uint32_t word) {
  // The exponent's lowest bit, added to an exponent of ones, carries into the sign's place.
  constexpr std::uint32_t kLowest = std::is_same_v<T, __half> ? 0x04000400 : 0x00800080;
  return ((word & 0x7fff7fff) + kLowest) & 0x80008000;
}

template <typename T>
__device__ __forceinline__ bool any_not_finite(const uint4& p) {
  return (not_finite<T>(p.x) | not_finite<T>(p.y) | not_finite<T>(p.z) | not_finite<T>(p.w)) != 0;
}

/// The same with zeros where an element is not finite.
template <typename T>
__device__ __forceinline__ uint4 only_finite(const uint4& p) {
  const auto finite = [](std::uint32_t word) {
    return word & ~((not_finite<T>(word) >> 15) * 0xffff);
  };
  return uint4{finite(p.x), finite(p.y), finite(p.z), finite(p.w)};
}

/// Adds the elements of a word that are not finite to outputs of rows that see them: out[0] and [1]
/// of the first row, out[2] and [3] of the second.
template <typename T>
__device__ __forceinline__ void add_not_finite(std::uint32_t word, bool first, bool second,
                                               float* out) {
  const std::uint32_t bad = not_finite<T>(word);
  if (bad == 0) return;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    if ((bad >> (16 * b) & 0x8000) == 0) continue;
    const auto bits = static_cast<std::uint16_t>(word >> (16 * b));
    const auto value = static_cast<float>(reinterpret_cast<const T&>(bits));
    if (first) out[b] += value;
    if (second) out[2 + b] += value;
  }
}

}  // namespace fovea::cuda
