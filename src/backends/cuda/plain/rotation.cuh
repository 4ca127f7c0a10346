// The rotation of channel pairs.
#pragma once

#include "backends/cuda/plain/elements.cuh"
#include "ops/rope_angles.h"

namespace fovea::cuda {

/// Channels of one pair and what they become.
struct TurnedPair {
  std::int64_t first, second;
  float first_value, second_value;
};

/// Pair `pair` of a head whose channel i is load_channel(i), rounded to `dtype`.
template <class LoadChannel>
__device__ TurnedPair turn_pair(const RopeAngles& angles, std::int64_t token, std::int64_t pair,
                                DType dtype, LoadChannel load_channel) {
  const std::int64_t pairs = angles.cos_sin.shape[1] / 2;
  const bool neox = angles.pairing == RopePairing::neox;
  const MropeSections& sections = angles.sections;
  const bool multi_axis = sections.pairs[0] + sections.pairs[1] + sections.pairs[2] > 0;
  const std::int64_t position = load_index(
      angles.positions, multi_axis ? at(angles.positions, mrope_axis(sections, pair), token)
                                   : at(angles.positions, token));
  const double cos = load_f32(angles.cos_sin, at(angles.cos_sin, position, pair));
  const double sin = load_f32(angles.cos_sin, at(angles.cos_sin, position, pairs + pair));
  TurnedPair turned{.first = neox ? pair : 2 * pair, .second = neox ? pair + pairs : 2 * pair + 1};
  const double a = load_channel(turned.first);
  const double b = load_channel(turned.second);
  turned.first_value = rounded(dtype, a * cos - b * sin);
  turned.second_value = rounded(dtype, b * cos + a * sin);
  return turned;
}

__device__ inline std::int64_t num_pairs(const RopeAngles& angles) {
  return angles.cos_sin.data ? angles.cos_sin.shape[1] / 2 : 0;
}

/// Channel i of a head that turns; beyond R, or without cos_sin, what it is.
template <class LoadChannel>
__device__ auto turned_channel(const RopeAngles& angles, std::int64_t token, std::int64_t i,
                               DType dtype, LoadChannel load_channel) -> decltype(load_channel(i)) {
  const std::int64_t pairs = num_pairs(angles);
  if (i >= 2 * pairs) return load_channel(i);
  const std::int64_t in_neox = i < pairs ? i : i - pairs;
  const std::int64_t pair = angles.pairing == RopePairing::neox ? in_neox : i / 2;
  const TurnedPair turned = turn_pair(angles, token, pair, dtype, load_channel);
  return i == turned.first ? turned.first_value : turned.second_value;
}

}  // namespace fovea::cuda
