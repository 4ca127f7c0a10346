// Rows of views with any innermost stride, as f32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "backends/cpu/kernels.h"
#include "fovea/tensor.h"

namespace fovea::cpu {

static_assert(static_cast<int>(DType::f32) == 0 && static_cast<int>(DType::f16) == 1 &&
                  static_cast<int>(DType::bf16) == 2,
              "the arrays of Kernels are indexed by DType");

/// Elements of a compute dtype along one dimension.
struct Row {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride = 1;  ///< In elements.

  std::int64_t element_bytes() const { return dtype == DType::f32 ? 4 : 2; }
  /// The row from element `i` on.
  Row from(std::int64_t i) const { return {data + i * stride * element_bytes(), dtype, stride}; }
};

/// The innermost dimension of `view` at `index` of the others.
Row row_of(const TensorView& view, std::initializer_list<std::int64_t> index);
inline Row row_of(float* data) { return {reinterpret_cast<std::byte*>(data), DType::f32, 1}; }

/// Writes zeros up to a multiple of kMaxLanes at most: `dst` has room for that.
void load_row(const Kernels& kernels, const Row& src, std::int64_t n, float* dst);
/// dst = src * scale.
void store_row(const Kernels& kernels, const float* src, float scale, std::int64_t n,
               const Row& dst);
/// dst = src; bit for bit when the dtypes are equal.
void copy_row(const Kernels& kernels, const Row& src, std::int64_t n, const Row& dst);

/// Asks for a row's memory ahead of time, towards L2: L1 is for what the kernels work on.
inline void prefetch_row(const Row& row, std::int64_t n) {
  if (row.stride != 1) return;
  constexpr std::int64_t kCacheLine = 64;
  const std::int64_t bytes = n * row.element_bytes();
  for (std::int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(row.data + i, 0, 2);
}

/// One element. Only where strides leave no better way.
float load_element(const Row& row, std::int64_t i);
void store_element(const Row& row, std::int64_t i, float x);

/// Elements that a row is worked through at a time where a buffer on the stack is needed.
inline constexpr std::int64_t kRowChunk = 256;

}  // namespace fovea::cpu
