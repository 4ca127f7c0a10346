// CUDA kernels and the devices that they run on. backends/cuda_stub defines the same in builds
// without CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ops/backend.h"

namespace fovea {

struct CudaDevice {
  std::string name;
  int major = 0;  ///< Of the compute capability.
  int minor = 0;
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t l2_bytes = 0;
};

/// Throws Error(unsupported) that says why device `index` cannot be used: a build without CUDA, no
/// driver, no such device, a compute capability below 8.0.
CudaDevice open_cuda_device(int index);

/// The kernels for a compute capability of that major number; 0: those of any.
const Backend& cuda_backend(int major);

MemorySource cuda_memory(int index);
/// Managed memory, or pinned where host and device `index` may not use that at once.
MemorySource cuda_host_memory(int index);

/// A cudaStream_t that does not wait for the default stream.
std::shared_ptr<void> make_cuda_stream(int index);

}  // namespace fovea
