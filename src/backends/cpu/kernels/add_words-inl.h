// Sums over neighbouring lanes of many vectors at once.
// Included inside an instruction set's unit.
#include <utility>

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Sums of neighbouring blocks of lanes in pairs, those of a first.
template <int Block, int... Lane>
FOVEA_INLINE IntVec add_neighbours(IntVec a, IntVec b, std::integer_sequence<int, Lane...>) {
  return add(__builtin_shufflevector(a, b, (Lane / Block * 2 * Block + Lane % Block)...),
             __builtin_shufflevector(a, b, ((Lane / Block * 2 + 1) * Block + Lane % Block)...));
}

/// Adds up every Words lanes of each vector: sums[0] has those of the first Words vectors.
template <int Words>
FOVEA_INLINE void add_words(IntVec (&sums)[kDotSums], int vectors) {
  if constexpr (Words > 1) {
    vectors /= 2;
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) {
      sums[i] = add_neighbours<Words / 2>(sums[2 * i], sums[2 * i + 1],
                                          std::make_integer_sequence<int, kLanes>());
    }
    add_words<Words / 2>(sums, vectors);
  }
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
