// Elements of views and of stored rows, one at a time.
#pragma once

#include <cstring>

#include "fovea/ops.h"
#include "kv/formats/fp8_ds_mla/layout.h"
#include "quant/codes.h"

namespace fovea::cuda {

/// Element `i` from `data` on, of a compute dtype or f8e4m3fn.
__device__ inline float load(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f16:
      return widen(static_cast<const Float16*>(data)[i]);
    case DType::bf16:
      return widen(static_cast<const BFloat16*>(data)[i]);
    case DType::f8e4m3fn:
      return widen(static_cast<const Float8E4M3FN*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

__device__ inline void store(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::f16:
      static_cast<Float16*>(data)[i] = narrow<Float16>(value);
      break;
    case DType::bf16:
      static_cast<BFloat16*>(data)[i] = narrow<BFloat16>(value);
      break;
    default:
      static_cast<float*>(data)[i] = value;
  }
}

/// `value` as an element of `dtype` holds it.
__device__ inline float rounded(DType dtype, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case DType::f16:
      return widen(narrow<Float16>(single));
    case DType::bf16:
      return widen(narrow<BFloat16>(single));
    default:
      return single;
  }
}

/// Bit for bit between equal dtypes, NaN payloads too.
__device__ inline void copy_element(const void* from, DType from_dtype, std::int64_t i, void* to,
                                    DType to_dtype, std::int64_t j) {
  if (from_dtype != to_dtype) {
    store(to, to_dtype, j, load(from, from_dtype, i));
  } else if (from_dtype == DType::f32) {
    static_cast<std::uint32_t*>(to)[j] = static_cast<const std::uint32_t*>(from)[i];
  } else {
    static_cast<std::uint16_t*>(to)[j] = static_cast<const std::uint16_t*>(from)[i];
  }
}

// Where index [i], [i, j] or [i, j, k] of a view lies, in elements.
__device__ inline std::int64_t at(const TensorView& view, std::int64_t i) {
  return i * view.strides[0];
}
__device__ inline std::int64_t at(const TensorView& view, std::int64_t i, std::int64_t j) {
  return i * view.strides[0] + j * view.strides[1];
}
__device__ inline std::int64_t at(const TensorView& view, std::int64_t i, std::int64_t j,
                                  std::int64_t k) {
  return i * view.strides[0] + j * view.strides[1] + k * view.strides[2];
}

__device__ inline float load_f32(const TensorView& view, std::int64_t offset) {
  return static_cast<const float*>(view.data)[offset];
}

/// Element of an i32 or i64 view.
__device__ inline std::int64_t load_index(const TensorView& view, std::int64_t offset) {
  return view.dtype == DType::i64 ? static_cast<const std::int64_t*>(view.data)[offset]
                                  : static_cast<const std::int32_t*>(view.data)[offset];
}

/// How a head of a stored row lies in memory, as KvFormat says.
struct HeadFormat {
  DType dtype = DType::f32;
  KvScales scales = KvScales::none;
  float scale = 1.f;
  bool power_of_two_scales = false;
  std::int64_t elements = 0;
  std::int64_t first_group = 0;
  std::int64_t code_bytes = 0;  ///< With scales per token: where they start.
  std::int64_t bytes = 0;
};

/// A PagedKvCache as kernels read it.
struct CacheRows {
  std::byte* first = nullptr;
  std::int64_t block_size = 1;
  std::int64_t block_stride = 0;
  std::int64_t row_stride = 0;
  HeadFormat head;

  CacheRows() = default;
  /// The number of heads is the op's: formats without scales per head need not know it.
  CacheRows(const PagedKvCache& cache, std::int64_t num_heads) {
    KvFormat format = cache.format();
    format.num_heads = num_heads;
    first = cache.num_blocks() > 0 ? cache.row(0, 0) : nullptr;
    block_size = cache.block_size();
    block_stride = cache.layout().block_stride;
    row_stride = cache.layout().row_stride;
    head = {.dtype = format.dtype,
            .scales = format.scales,
            .scale = format.scale,
            .power_of_two_scales = format.power_of_two_scales,
            .elements = format.head_elements(),
            .first_group = format.first_group,
            .code_bytes = bytes_of(format.dtype, format.head_elements()),
            .bytes = format.head_bytes()};
  }

  __device__ std::byte* row(std::int64_t block, std::int64_t row) const {
    return first + block * block_stride + row * row_stride;
  }
  __device__ std::byte* slot(std::int64_t slot) const {
    return row(slot / block_size, slot % block_size);
  }
};

/// Heads of any width: floats may lie at any address.
__device__ inline float load_unaligned(const std::byte* data) {
  float value;
  memcpy(&value, data, sizeof value);
  return value;
}

/// The value of code `i`.
__device__ inline float decode_code(DType dtype, const std::byte* codes, std::int64_t i) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(codes);
  switch (dtype) {
    case DType::i4:
      return IntegerCode<4>::decode(bytes[i / 2] >> (i % 2 * 4) & 0xf);
    case DType::i8:
      return IntegerCode<8>::decode(bytes[i]);
    case DType::f8e5m2:
      return FloatCode<Float8E5M2>::decode(bytes[i]);
    default:
      return FloatCode<Float8E4M3FN>::decode(bytes[i]);
  }
}

/// Element `i` of a stored head: decode_row's value.
__device__ inline float decode_element(const HeadFormat& format, const std::byte* head,
                                       std::int64_t i) {
  switch (format.scales) {
    case KvScales::none:
      return load(head, format.dtype, i);
    case KvScales::per_tensor:
      return decode_code(format.dtype, head, i) * format.scale;
    case KvScales::per_token: {
      const std::byte* scale = head + format.code_bytes + (i < format.first_group ? 0 : 4);
      return decode_code(format.dtype, head, i) * load_unaligned(scale);
    }
    default: {
      using namespace kv_fp8_ds_mla;
      if (i >= kLatent) return load(head + kRopeAt, DType::bf16, i - kLatent);
      return decode_code(DType::f8e4m3fn, head, i) *
             load_unaligned(head + kScalesAt + i / kGroup * 4);
    }
  }
}

}  // namespace fovea::cuda
