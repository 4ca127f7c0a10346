// What kernels do about an index that is out of range.
#pragma once

#include "backends/cuda/plain/elements.cuh"

namespace fovea::cuda {

/// Whether `value` is in [begin, end). Without a fault to report to it is not looked at.
__device__ inline bool is_in_range(DeviceFault* fault, DeviceFault::Argument argument,
                                   std::int64_t index, std::int64_t value, std::int64_t begin,
                                   std::int64_t end) {
  if (fault == nullptr || (value >= begin && value < end)) return true;
  if (atomicCAS(&fault->taken, 0, 1) == 0) {  // The first is reported.
    fault->argument = argument;
    fault->index = index;
    fault->value = value;
    fault->begin = begin;
    fault->end = end;
  }
  return false;
}

/// Whether the table has the positions of token `t`.
__device__ inline bool has_positions(DeviceFault* fault, const RopeAngles& angles, std::int64_t t) {
  if (fault == nullptr || angles.cos_sin.data == nullptr) return true;
  const TensorView& positions = angles.positions;
  const int axes = positions.ndim == 2 ? 3 : 1;
  for (int axis = 0; axis < axes; ++axis) {
    const std::int64_t offset = axes == 1 ? at(positions, t) : at(positions, axis, t);
    const std::int64_t tokens = positions.shape[positions.ndim - 1];
    if (!is_in_range(fault, DeviceFault::Argument::positions, axis * tokens + t,
                     load_index(positions, offset), 0, angles.cos_sin.shape[0])) {
      return false;
    }
  }
  return true;
}

}  // namespace fovea::cuda
