// What a query row sees, as masks take it.
#pragma once

#include <cstdint>

namespace fovea::cuda {

/// Keys [begin, end); under a draft tree, of the drafts only those whose bits are set.
struct alignas(16) SeenKeys {
  std::int32_t begin, end;
  std::uint64_t drafts;
};

/// What the rows of a tile see.
struct alignas(16) VisibleKeys {
  std::int32_t any_begin, any_end;        ///< Some row sees them; a draft perhaps none.
  std::int32_t common_begin, common_end;  ///< Every row sees them.

  /// Every row sees keys [begin, end).
  __device__ __forceinline__ bool are_common(std::int32_t begin, std::int32_t end) const {
    return begin >= common_begin && end <= common_end;
  }
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
