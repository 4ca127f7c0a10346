// Device memory of checks and timings, and elements as bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backends/cuda/sm90/element_type.h"

namespace fovea::cuda::test {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(2);
}

template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t n) : size_(n) {
    check_cuda(cudaMalloc(&data_, std::max<std::size_t>(n, 1) * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { set(host); }
  DeviceArray(DeviceArray&& other) noexcept { swap(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  void set(const std::vector<T>& host) {
    check_cuda(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
               "copy to device");
  }
  void poison() const { check_cuda(cudaMemset(data_, 0xff, size_ * sizeof(T)), "cudaMemset"); }
  std::vector<T> get(std::size_t first, std::size_t n) const {
    std::vector<T> host(n);
    check_cuda(cudaMemcpy(host.data(), data_ + first, n * sizeof(T), cudaMemcpyDeviceToHost),
               "copy to host");
    return host;
  }
  std::vector<T> get() const { return get(0, size_); }

 private:
  void swap(DeviceArray& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

inline std::uint16_t encode(ElementType type, float value) {
  std::uint16_t bits;
  if (type == ElementType::bf16) {
    const __nv_bfloat16 v = __float2bfloat16(value);
    std::memcpy(&bits, &v, 2);
  } else {
    const __half v = __float2half(value);
    std::memcpy(&bits, &v, 2);
  }
  return bits;
}

inline double decode(ElementType type, const void* base, std::size_t at) {
  if (type == ElementType::f32) return static_cast<const float*>(base)[at];
  std::uint16_t bits = static_cast<const std::uint16_t*>(base)[at];
  if (type == ElementType::bf16) {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  __half h;
  std::memcpy(&h, &bits, 2);
  return __half2float(h);
}

}  // namespace fovea::cuda::test
