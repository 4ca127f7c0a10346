#include <bit>

#include "fovea/block_pool.h"

namespace fovea {
namespace {

/// A bijection of 64-bit words in which every input bit flips half of the output bits.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  return x ^ (x >> 32);
}

// Odd, with no pattern in the bits: the fractional parts of the square roots of 2 and 3.
constexpr std::uint64_t kStepHigh = 0x6a09e667f3bcc909u;
constexpr std::uint64_t kStepLow = 0xbb67ae8584caa73bu;

}  // namespace

BlockHash hash_block(const BlockHash& parent, std::span<const std::int32_t> token_ids) {
  // For a given token a step is a bijection of the state, and for a given state it sends different
  // tokens to different states: blocks that differ in one place cannot meet again.
  BlockHash state = parent;
  for (const std::int32_t token : token_ids) {
    // From 1 up: token 0 must leave its trace too.
    const std::uint64_t word = std::uint64_t{static_cast<std::uint32_t>(token)} + 1;
    state.high = mix(state.high + word * kStepHigh);
    state.low = mix((state.low ^ std::rotl(state.high, 32)) + word * kStepLow);
  }
  // high does not depend on low yet.
  state.high = mix(state.high ^ state.low);
  return state;
}

}  // namespace fovea
