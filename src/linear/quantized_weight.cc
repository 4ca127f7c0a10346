// Weights as codes and scales of groups.
#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/float_bits.h"
#include "fovea/linear.h"
#include "fovea/quant.h"
#include "linear/product.h"
#include "quant/mxfp4.h"

namespace fovea {
namespace {

constexpr WeightGroups kMxfp4Groups{1, kMxfp4Group};

float code_at(const QuantizedWeight& weight, std::int64_t m, std::int64_t k) {
  if (!is_mxfp4(weight)) return widen(*weight.codes.ptr<Float8E4M3FN>({m, k}));
  const int pair = *weight.codes.ptr<std::uint8_t>({m, k / 2});
  return widen(Float4E2M1{static_cast<std::uint8_t>(pair >> (k % 2 * 4) & 0xf)});
}

template <class T>
void dequantize_rows(const QuantizedWeight& weight, const TensorView& out) {
  const std::int64_t rows = weight.codes.shape[0], columns = in_features(weight);
  const std::int64_t group_out = group_extent(weight.groups.out, rows);
  const std::int64_t group_in = group_extent(weight.groups.in, columns);
  for (std::int64_t m = 0; m < rows; ++m) {
    T* row = out.ptr<T>({m, 0});
    for (std::int64_t k = 0; k < columns; ++k) {
      row[k] = narrow<T>(code_at(weight, m, k) *
                         scale_at(weight.scale, m / group_out, k / group_in));
    }
  }
}

void check_groups(const WeightGroups& groups) {
  FOVEA_CHECK(groups.out >= 0 && groups.in >= 0, invalid_argument,
              "groups are [{}, {}], but must not be negative", groups.out, groups.in);
}

/// Of FP8 or, where the codes are u8, of MXFP4.
void check_codes(const TensorView& codes) {
  FOVEA_CHECK(codes && codes.ndim == 2 && codes.shape[0] > 0 && codes.shape[1] > 0 &&
                  (codes.dtype == DType::f8e4m3fn || codes.dtype == DType::u8) &&
                  (codes.strides[1] == 1 || codes.shape[1] == 1),
              invalid_argument,
              "codes is {}, but must be f8e4m3fn[out_features, in_features] or u8[out_features, "
              "in_features / 2] with unit innermost stride",
              to_string(codes));
}

void check_mxfp4(const QuantizedWeight& weight) {
  FOVEA_CHECK(weight.groups == kMxfp4Groups, invalid_argument,
              "groups are [{}, {}], but must be [1, {}]: u8 codes are MXFP4", weight.groups.out,
              weight.groups.in, kMxfp4Group);
  FOVEA_CHECK(in_features(weight) % kMxfp4Group == 0, invalid_argument,
              "codes is {}, but MXFP4 must have whole groups of {} weights, two in a byte",
              to_string(weight.codes), kMxfp4Group);
}

void check_dense_weight(const TensorView& weight) {
  FOVEA_CHECK(weight && weight.ndim == 2 && weight.shape[0] > 0 && weight.shape[1] > 0 &&
                  is_compute_dtype(weight.dtype),
              invalid_argument,
              "weight is {}, but must be f32, f16 or bf16 [out_features, in_features]",
              to_string(weight));
}

}  // namespace

float scale_at(const TensorView& scale, std::int64_t i, std::int64_t j) {
  switch (scale.dtype) {
    case DType::f16:
      return to_float(*scale.ptr<Float16>({i, j}));
    case DType::bf16:
      return to_float(*scale.ptr<BFloat16>({i, j}));
    case DType::f8e8m0:
      return to_float(*scale.ptr<Float8E8M0>({i, j}));
    default:
      return *scale.ptr<float>({i, j});
  }
}

void check_quantized_weight(const QuantizedWeight& weight) {
  const TensorView& codes = weight.codes;
  check_codes(codes);
  check_groups(weight.groups);
  if (is_mxfp4(weight)) check_mxfp4(weight);
  const std::int64_t in = in_features(weight);
  const std::int64_t rows = num_groups(codes.shape[0], weight.groups.out);
  const std::int64_t columns = num_groups(in, weight.groups.in);
  const bool fits_dtype = is_mxfp4(weight) ? weight.scale.dtype == DType::f8e8m0
                                           : is_compute_dtype(weight.scale.dtype);
  FOVEA_CHECK(
      weight.scale && weight.scale.ndim == 2 && weight.scale.shape[0] == rows &&
          weight.scale.shape[1] == columns && fits_dtype,
      invalid_argument,
      "scale is {}, but must be {} [{}, {}]: one for each group of [{}, {}] of codes {}",
      to_string(weight.scale), is_mxfp4(weight) ? "f8e8m0" : "f32, f16 or bf16", rows, columns,
      group_extent(weight.groups.out, codes.shape[0]), group_extent(weight.groups.in, in),
      to_string(codes));
}

Tensor dequantize_weight(const QuantizedWeight& weight, DType dtype) {
  check_quantized_weight(weight);
  FOVEA_CHECK(is_compute_dtype(dtype), invalid_argument,
              "dtype is {}, but must be f32, f16 or bf16", name_of(dtype));
  Tensor out = Tensor::empty(dtype, {weight.codes.shape[0], in_features(weight)});
  switch (dtype) {
    case DType::f16:
      dequantize_rows<Float16>(weight, out);
      break;
    case DType::bf16:
      dequantize_rows<BFloat16>(weight, out);
      break;
    default:
      dequantize_rows<float>(weight, out);
      break;
  }
  return out;
}

OwnedQuantizedWeight quantize_weight(const TensorView& weight, const WeightGroups& groups) {
  check_dense_weight(weight);
  check_groups(groups);
  const std::int64_t rows = weight.shape[0], columns = weight.shape[1];
  const std::int64_t group_out = group_extent(groups.out, rows);
  const std::int64_t group_in = group_extent(groups.in, columns);
  OwnedQuantizedWeight result{.codes = Tensor::empty(DType::f8e4m3fn, {rows, columns}),
                              .scale = Tensor::empty(DType::f32, {num_groups(rows, groups.out),
                                                                  num_groups(columns, groups.in)}),
                              .groups = groups};
  std::vector<float> values;
  for (std::int64_t i = 0; i < rows; i += group_out) {
    for (std::int64_t j = 0; j < columns; j += group_in) {
      const TensorView group = weight.slice(0, i, std::min(i + group_out, rows))
                                   .slice(1, j, std::min(j + group_in, columns));
      values.resize(static_cast<std::size_t>(group.numel()));
      copy(group, TensorView::of(values.data(), {group.shape[0], group.shape[1]}));
      const float scale = group_scale(DType::f8e4m3fn, values);
      *result.scale.ptr<float>({i / group_out, j / group_in}) = scale;
      const auto width = static_cast<std::size_t>(group.shape[1]);
      for (std::int64_t m = 0; m < group.shape[0]; ++m) {
        quantize_group(DType::f8e4m3fn,
                       std::span(values).subspan(static_cast<std::size_t>(m) * width, width), scale,
                       {result.codes.ptr<std::byte>({i + m, j}), width});
      }
    }
  }
  return result;
}

OwnedQuantizedWeight quantize_weight_mxfp4(const TensorView& weight) {
  check_dense_weight(weight);
  const std::int64_t rows = weight.shape[0], columns = weight.shape[1];
  FOVEA_CHECK(columns % kMxfp4Group == 0, invalid_argument,
              "weight is {}, but MXFP4 must have whole groups of {} in_features", to_string(weight),
              kMxfp4Group);
  OwnedQuantizedWeight result{.codes = Tensor::empty(DType::u8, {rows, columns / 2}),
                              .scale = Tensor::empty(DType::f8e8m0, {rows, columns / kMxfp4Group}),
                              .groups = kMxfp4Groups};
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t k = 0; k < columns; k += kMxfp4Group) {
      float values[kMxfp4Group];
      copy(weight.select(0, m).slice(0, k, k + kMxfp4Group), TensorView::of(values, {kMxfp4Group}));
      *result.scale.ptr<Float8E8M0>({m, k / kMxfp4Group}) = encode_mxfp4_group(
          values, {result.codes.ptr<std::byte>({m, k / 2}), std::size_t{kMxfp4Group / 2}});
    }
  }
  return result;
}

}  // namespace fovea
