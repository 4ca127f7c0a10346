// Counter-based random numbers: the same value for the same arguments, on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace fovea::engine {

/// The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection that spreads every bit.
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// What a number is drawn for, so that draws with equal arguments are independent.
enum class Stream : std::uint64_t {
  token,
  shared_token,
  length,
  arrival,
  sharing,
  sample,
  hidden,
  draft
};

constexpr std::uint64_t draw(std::uint64_t seed, Stream stream, std::uint64_t a,
                             std::uint64_t b = 0) {
  return mix(mix(mix(seed ^ mix(static_cast<std::uint64_t>(stream))) ^ a) ^ mix(b));
}

/// In [0, 1).
constexpr double to_uniform(std::uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

/// In [0, n): the upper half of bits * n, free of a modulo's bias for every n that occurs here.
constexpr std::uint64_t to_range(std::uint64_t bits, std::uint64_t n) {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(bits) * n) >> 64);
}

/// Standard normal, by Box and Muller.
inline double to_normal(std::uint64_t bits) {
  const double radius = std::sqrt(-2 * std::log(1 - to_uniform(bits)));
  return radius * std::cos(2 * std::numbers::pi * to_uniform(mix(bits)));
}

}  // namespace fovea::engine
