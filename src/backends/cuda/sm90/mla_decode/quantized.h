// Kernels over quantised rows, apart from the dense ones to be compiled beside them.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

struct QuantizedKernel {
  void (*function)(KernelParams);
  std::size_t shared_bytes;
  int threads;
  std::int32_t row_bytes;  ///< Of a cache row, scales included.
};

/// For 16 query rows of a tile.
QuantizedKernel quantized_kernel(CacheFormat format);

}  // namespace fovea::cuda::mla
