// Rows of a view or a cache, of any compute dtype and stride, read and written as doubles.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/float_bits.h"
#include "fovea/tensor.h"

namespace fovea::reference {

/// `size` elements, `stride` elements apart.
struct Row {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride = 1;
  std::int64_t size = 0;
};

/// Calls fn with an element pointer of the row's type.
template <class Fn>
decltype(auto) with_elements(const Row& row, Fn&& fn) {
  switch (row.dtype) {
    case DType::f16:
      return fn(static_cast<Float16*>(row.data));
    case DType::bf16:
      return fn(static_cast<BFloat16*>(row.data));
    default:
      return fn(static_cast<float*>(row.data));
  }
}

/// Row `i` of a view [T, D].
inline Row row_of(const TensorView& view, std::int64_t i) {
  Row row{view.data, view.dtype, view.strides[1], view.shape[1]};
  with_elements(row, [&](auto* data) { row.data = data + i * view.strides[0]; });
  return row;
}

/// Row `i`, head `j` of a view [T, N, D].
inline Row row_of(const TensorView& view, std::int64_t i, std::int64_t j) {
  Row row{view.data, view.dtype, view.strides[2], view.shape[2]};
  with_elements(row,
                [&](auto* data) { row.data = data + i * view.strides[0] + j * view.strides[1]; });
  return row;
}

/// Elements [begin, end) of a row.
inline Row part_of(const Row& row, std::int64_t begin, std::int64_t end) {
  Row part = row;
  part.size = end - begin;
  with_elements(row, [&](auto* data) { part.data = data + begin * row.stride; });
  return part;
}

inline double get(const Row& row, std::int64_t i) {
  return with_elements(row, [&](auto* data) -> double { return widen(data[i * row.stride]); });
}

inline void set(const Row& row, std::int64_t i, double value) {
  with_elements(
      row, [&]<class T>(T* data) { data[i * row.stride] = narrow<T>(static_cast<float>(value)); });
}

inline void load(const Row& row, double* values) {
  with_elements(row, [&](auto* data) {
    for (std::int64_t i = 0; i < row.size; ++i) values[i] = widen(data[i * row.stride]);
  });
}

inline void store(const double* values, const Row& row) {
  with_elements(row, [&]<class T>(T* data) {
    for (std::int64_t i = 0; i < row.size; ++i) {
      data[i * row.stride] = narrow<T>(static_cast<float>(values[i]));
    }
  });
}

/// Bit for bit, NaN payloads too, where dtypes are equal; else rounded.
inline void copy(const Row& src, const Row& dst) {
  const auto bytes = static_cast<std::size_t>(bytes_of(src.dtype, 1));
  for (std::int64_t i = 0; i < src.size; ++i) {
    if (src.dtype == dst.dtype) {
      with_elements(src, [&]<class T>(T* from) {
        std::memmove(static_cast<T*>(dst.data) + i * dst.stride, from + i * src.stride, bytes);
      });
    } else {
      set(dst, i, get(src, i));
    }
  }
}

}  // namespace fovea::reference
