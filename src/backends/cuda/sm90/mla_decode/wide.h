// The kernel for tiles of 64 query rows, as the launch takes it.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

constexpr int kWideRows = 64;
constexpr int kWideThreads = 384;  ///< Two warpgroups that compute, one that loads.

struct WideKernel {
  void (*function)(KernelParams, CUtensorMap);
  std::size_t shared_bytes;
};

WideKernel wide_kernel(ElementType type);

}  // namespace fovea::cuda::mla
