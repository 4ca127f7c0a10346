#include "backends/cpu/rows.h"

#include <algorithm>
#include <cstring>

namespace fovea::cpu {
namespace {

template <class T>
T* element(const Row& row, std::int64_t i) {
  return reinterpret_cast<T*>(row.data) + i * row.stride;
}

}  // namespace

Row row_of(const TensorView& view, std::initializer_list<std::int64_t> index) {
  std::int64_t offset = 0;
  std::size_t d = 0;
  for (std::int64_t i : index) offset += i * view.strides[d++];
  const Row first{static_cast<std::byte*>(view.data), view.dtype, 1};
  return {first.from(offset).data, view.dtype, view.strides[d]};
}

float load_element(const Row& row, std::int64_t i) {
  switch (row.dtype) {
    case DType::f16:
      return to_float(*element<Float16>(row, i));
    case DType::bf16:
      return to_float(*element<BFloat16>(row, i));
    default:
      return *element<float>(row, i);
  }
}

void store_element(const Row& row, std::int64_t i, float x) {
  switch (row.dtype) {
    case DType::f16:
      *element<Float16>(row, i) = from_float<Float16>(x);
      return;
    case DType::bf16:
      *element<BFloat16>(row, i) = from_float<BFloat16>(x);
      return;
    default:
      *element<float>(row, i) = x;
  }
}

void load_row(const Kernels& kernels, const Row& src, std::int64_t n, float* dst) {
  if (src.stride == 1) {
    kernels.load[static_cast<int>(src.dtype)](src.data, n, dst);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) dst[i] = load_element(src, i);
  for (std::int64_t i = n; i % kernels.lanes != 0; ++i) dst[i] = 0.f;
}

void store_row(const Kernels& kernels, const float* src, float scale, std::int64_t n,
               const Row& dst) {
  if (dst.stride == 1) {
    kernels.store[static_cast<int>(dst.dtype)](src, scale, n, dst.data);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) store_element(dst, i, src[i] * scale);
}

void copy_row(const Kernels& kernels, const Row& src, std::int64_t n, const Row& dst) {
  if (src.dtype == dst.dtype && src.stride == 1 && dst.stride == 1) {
    std::memmove(dst.data, src.data, static_cast<std::size_t>(n * src.element_bytes()));
    return;
  }
  alignas(64) float chunk[kRowChunk];
  for (std::int64_t i = 0; i < n; i += kRowChunk) {
    const std::int64_t count = std::min(kRowChunk, n - i);
    load_row(kernels, src.from(i), count, chunk);
    store_row(kernels, chunk, 1.f, count, dst.from(i));
  }
}

}  // namespace fovea::cpu
