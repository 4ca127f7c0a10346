// Devices and their memory.
#include <cuda_runtime_api.h>

#include "backends/cuda/backend.h"
#include "backends/cuda/launch.h"
#include "core/check.h"

namespace fovea {
namespace {

/// Memory that host and GPU share.
std::byte* checked(cudaError_t status, void* memory, std::int64_t bytes) {
  FOVEA_CHECK(status == cudaSuccess, resource_exhausted,
              "no memory for {} bytes that host and GPU share: {}", bytes,
              cudaGetErrorString(status));
  return static_cast<std::byte*>(memory);
}

}  // namespace

CudaDevice open_cuda_device(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  FOVEA_CHECK(status == cudaSuccess && count > 0, unsupported,
              "backend is cuda, but there is no usable GPU: {}",
              status == cudaSuccess ? "the driver reports none" : cudaGetErrorString(status));
  FOVEA_CHECK(index >= 0 && index < count, unsupported,
              "cuda_device is {}, but it must be below {}, the GPUs that the driver reports", index,
              count);
  cudaDeviceProp properties;
  cuda::check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  FOVEA_CHECK(properties.major >= 8, unsupported,
              "CUDA device {} ({}) has compute capability {}.{}; it must be 8.0 or later", index,
              properties.name, properties.major, properties.minor);
  return {.name = properties.name,
          .major = properties.major,
          .minor = properties.minor,
          .multiprocessors = properties.multiProcessorCount,
          .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
          .l2_bytes = properties.l2CacheSize};
}

MemorySource cuda_memory(int index) {
  const auto allocate = [](Device device, std::int64_t bytes) {
    const cuda::CurrentDevice current(device);
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, static_cast<std::size_t>(bytes));
    FOVEA_CHECK(status == cudaSuccess, resource_exhausted,
                "no memory for {} bytes on CUDA device {}: {}", bytes, device.index,
                cudaGetErrorString(status));
    return static_cast<std::byte*>(memory);
  };
  // Waits for the work that is queued: some may still use it.
  const auto free = [](Device, std::byte* memory) { cudaFree(memory); };
  const auto copy = [](Device device, void* to, const void* from, std::int64_t bytes,
                       void* stream) {
    const cuda::CurrentDevice current(device);
    const auto queue = static_cast<cudaStream_t>(stream);
    const auto size = static_cast<std::size_t>(bytes);
    cuda::check(cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, queue), "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(queue), "cudaStreamSynchronize");
  };
  const auto wait = [](Device device, void* stream) {
    const cuda::CurrentDevice current(device);
    cuda::check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
  };
  return {{Device::Type::cuda, index}, allocate, free, copy, wait};
}

MemorySource cuda_host_memory(int index) {
  int managed = 0;
  cuda::check(cudaDeviceGetAttribute(&managed, cudaDevAttrConcurrentManagedAccess, index),
              "cudaDeviceGetAttribute");
  if (managed != 0) {
    return {{},
            [](Device, std::int64_t bytes) {
              void* memory = nullptr;
              const auto size = static_cast<std::size_t>(bytes);
              const cudaError_t status = cudaMallocManaged(&memory, size, cudaMemAttachGlobal);
              return checked(status, memory, bytes);
            },
            [](Device, std::byte* memory) { cudaFree(memory); }};
  }
  return {{},
          [](Device, std::int64_t bytes) {
            void* memory = nullptr;
            const cudaError_t status = cudaHostAlloc(&memory, static_cast<std::size_t>(bytes),
                                                     cudaHostAllocPortable);
            return checked(status, memory, bytes);
          },
          [](Device, std::byte* memory) { cudaFreeHost(memory); }};
}

}  // namespace fovea
