// What a query row sees, as masks take it.
#pragma once

#include <cstdint>

namespace fovea::cuda {

/// Keys [begin, end); under a draft tree, of the drafts only those whose bits are set.
struct alignas(16) SeenKeys {
  std::int32_t begin, end;
  std::uint64_t drafts;
};

/// The lowest `count` bits, at most as many as there are.
template <typename Bits>
__device__ __forceinline__ Bits low_bits(std::int32_t count) {
  return count >= static_cast<std::int32_t>(8 * sizeof(Bits)) ? ~Bits{0} : (Bits{1} << count) - 1;
}

/// Bit i: begin <= i < end, which may lie anywhere.
template <typename Bits>
__device__ __forceinline__ Bits bits_between(std::int32_t begin, std::int32_t end) {
  return low_bits<Bits>(max(end, 0)) & ~low_bits<Bits>(max(begin, 0));
}

}  // namespace fovea::cuda
