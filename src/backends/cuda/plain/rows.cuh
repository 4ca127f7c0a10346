// Rows of elements, several at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "backends/cuda/plain/block.cuh"
#include "backends/cuda/plain/elements.cuh"

namespace fovea::cuda {

/// Elements that a thread takes together: 16 bytes of them in the 16-bit dtypes.
constexpr int kTogether = 8;

struct Values {
  float at[kTogether];
};

// As widen and narrow, but for the payloads of NaNs: an instruction or two where those, which need
// no processor's own conversions, take tens.
__device__ inline float widened(float x) { return x; }
__device__ inline float widened(Float16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline float widened(BFloat16 x) {
  return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16);
}
__device__ inline void narrow_to(float value, float& to) { to = value; }
__device__ inline void narrow_to(float value, Float16& to) {
  to.bits = __half_as_ushort(__float2half_rn(value));
}
__device__ inline void narrow_to(float value, BFloat16& to) {
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

/// Elements of a compute dtype along the last dimension of a view.
class ElementRow {
 public:
  /// `offset`: of the first element, in elements.
  __device__ ElementRow(const TensorView& view, std::int64_t offset)
      : data_(view.data),
        dtype_(view.dtype),
        offset_(offset),
        stride_(view.strides[view.ndim - 1]),
        width_(view.shape[view.ndim - 1]) {}

  __device__ std::int64_t width() const { return width_; }

  /// Elements [i, i + kTogether), zeros behind the last.
  __device__ Values load(std::int64_t i) const {
    switch (dtype_) {
      case DType::f16:
        return load_as<Float16>(i);
      case DType::bf16:
        return load_as<BFloat16>(i);
      default:
        return load_as<float>(i);
    }
  }

  /// Those of elements [i, i + kTogether) that there are.
  __device__ void store(std::int64_t i, const Values& values) const {
    switch (dtype_) {
      case DType::f16:
        return store_as<Float16>(i, values);
      case DType::bf16:
        return store_as<BFloat16>(i, values);
      default:
        return store_as<float>(i, values);
    }
  }

 private:
  template <class T>
  __device__ T* from(std::int64_t i) const {
    return static_cast<T*>(data_) + offset_ + i * stride_;
  }
  /// Whether they are pieces of 16 bytes.
  template <class T>
  __device__ bool are_vectors(std::int64_t i) const {
    return stride_ == 1 && i + kTogether <= width_ &&
           reinterpret_cast<std::uintptr_t>(from<T>(i)) % sizeof(uint4) == 0;
  }

  template <class T>
  __device__ Values load_as(std::int64_t i) const {
    constexpr int kVectors = sizeof(T) * kTogether / sizeof(uint4);
    T elements[kTogether] = {};
    if (are_vectors<T>(i)) {
      uint4 vectors[kVectors];
      for (int v = 0; v < kVectors; ++v) vectors[v] = reinterpret_cast<uint4*>(from<T>(i))[v];
      memcpy(elements, vectors, sizeof elements);
    } else {
      for (int j = 0; j < kTogether; ++j) {
        if (i + j < width_) elements[j] = *from<T>(i + j);
      }
    }
    Values values;
    for (int j = 0; j < kTogether; ++j) values.at[j] = widened(elements[j]);
    return values;
  }

  template <class T>
  __device__ void store_as(std::int64_t i, const Values& values) const {
    constexpr int kVectors = sizeof(T) * kTogether / sizeof(uint4);
    T elements[kTogether];
    for (int j = 0; j < kTogether; ++j) narrow_to(values.at[j], elements[j]);
    if (are_vectors<T>(i)) {
      uint4 vectors[kVectors];
      memcpy(vectors, elements, sizeof elements);
      for (int v = 0; v < kVectors; ++v) reinterpret_cast<uint4*>(from<T>(i))[v] = vectors[v];
    } else {
      for (int j = 0; j < kTogether; ++j) {
        if (i + j < width_) *from<T>(i + j) = elements[j];
      }
    }
  }

  void* data_;
  DType dtype_;
  std::int64_t offset_;
  std::int64_t stride_;
  std::int64_t width_;
};

/// 1 / sqrt(mean(x^2) + eps), in every thread of a block.
__device__ inline double rms_norm_scale(const ElementRow& x, float eps) {
  double sum = 0;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x * kTogether; i < x.width(); i += blockDim.x * kTogether) {
    const Values values = x.load(i);
    for (int j = 0; j < kTogether; ++j) {
      sum += static_cast<double>(values.at[j]) * static_cast<double>(values.at[j]);
    }
  }
  sum = reduce_block(sum, [](double a, double b) { return a + b; });
  return 1 / sqrt(sum / static_cast<double>(x.width()) + static_cast<double>(eps));
}

/// An element of a normed row, before it is rounded to its dtype.
__device__ inline float normed(float x, double scale, float weight) {
  return static_cast<float>(static_cast<double>(x) * scale * static_cast<double>(weight));
}

}  // namespace fovea::cuda
