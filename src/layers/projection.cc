#include "layers/projection.h"

#include <algorithm>

#include "core/check.h"
#include "layers/rows.h"

namespace fovea {
namespace {

std::int64_t in_features(const Projection& projection) { return projection.weight.shape[1]; }

/// Columns of the input that share a scale.
std::int64_t group_width(const Projection& projection) {
  const std::int64_t in = in_features(projection), width = projection.scale.groups.in;
  return width == 0 ? in : std::min(width, in);
}

/// The scales of each row, f32 [out, groups of the input].
Tensor row_scales(const Projection& projection) {
  const TensorView& scale = projection.scale.scale;
  const std::int64_t out = projection.weight.shape[0], rows = projection.scale.groups.out;
  Tensor result = Tensor::empty(DType::f32, {out, scale.shape[1]});
  for (std::int64_t m = 0; m < out; ++m) {
    copy(scale.select(0, rows == 0 ? 0 : m / rows), result.view().select(0, m));
  }
  return result;
}

/// What is in `owned`, with scales of rows.
void set_projection(const char* name, std::int64_t width, OwnedProjection& owned) {
  owned.projection = {name, owned.weight, {}};
  if (owned.scale) owned.projection.scale = {owned.scale, {.out = 1, .in = width}};
}

void check_widths(std::span<const Projection> parts) {
  for (const Projection& part : parts) {
    FOVEA_CHECK(group_width(part) == group_width(parts[0]), invalid_argument,
                "{} has groups of {} columns and {} of {}, but must have one width: they share a "
                "product",
                parts[0].name, group_width(parts[0]), part.name, group_width(part));
  }
}

}  // namespace

void check_projection(const Projection& p, DType dtype, std::int64_t out, std::int64_t in) {
  if (!p.is_quantized()) {
    check_shape(p.name, p.weight, dtype, {out, in});
    FOVEA_CHECK(!p.scale.scale, invalid_argument,
                "{}_scale is there, but {} is {}: only f8e4m3fn has a scale", p.name, p.name,
                to_string(p.weight));
    return;
  }
  check_shape(p.name, p.weight, DType::f8e4m3fn, {out, in});
  FOVEA_CHECK(p.scale.scale, invalid_argument, "{} is f8e4m3fn, but {}_scale is absent", p.name,
              p.name);
  try {
    check_quantized_weight(p.quantized());
  } catch (const Error& error) {
    fail(error.code(), "{}: {}", p.name, error.what());
  }
}

void check_reload(const Projection& p, const Linear& linear) {
  const std::optional<WeightGroups> groups = linear.groups();
  FOVEA_CHECK(p.is_quantized() == groups.has_value(), invalid_argument,
              "{} is {}, but was {} when the layer was made", p.name, name_of(p.weight.dtype),
              groups ? "f8e4m3fn" : name_of(linear.dtype()));
  FOVEA_CHECK(!groups || *groups == p.scale.groups, invalid_argument,
              "{} has groups of [{}, {}], but must have [{}, {}] as when the layer was made",
              p.name, p.scale.groups.out, p.scale.groups.in, groups->out, groups->in);
}

Linear make_linear(const Projection& p, const TensorView& bias, DType dtype,
                   LinearBackend backend, const MemorySource& memory) {
  if (p.is_quantized()) return Linear(p.quantized(), bias, dtype, memory);
  return Linear(p.weight, bias, backend, memory);
}

void reload(const Projection& p, const TensorView& bias, Linear& linear) {
  p.is_quantized() ? linear.reload(p.quantized(), bias) : linear.reload(p.weight, bias);
}

DenseWeight::DenseWeight(const Projection& projection, DType dtype) : view_(projection.weight) {
  if (!projection.is_quantized()) return;
  memory_ = dequantize_weight(projection.quantized(), dtype);
  view_ = memory_;
}

OwnedProjection fuse(std::span<const Projection> parts, DType dtype) {
  std::int64_t rows = 0;
  for (const Projection& part : parts) rows += part.weight.shape[0];
  const bool quantized = std::all_of(parts.begin(), parts.end(),
                                     [](const Projection& part) { return part.is_quantized(); });
  OwnedProjection result;
  result.weight = Tensor::empty(quantized ? DType::f8e4m3fn : dtype, {rows, in_features(parts[0])});
  if (quantized) {
    check_widths(parts);
    result.scale = Tensor::empty(DType::f32, {rows, parts[0].scale.scale.shape[1]});
  }
  std::int64_t begin = 0;
  for (const Projection& part : parts) {
    const std::int64_t end = begin + part.weight.shape[0];
    if (quantized) {
      copy(part.weight, result.weight.view().slice(0, begin, end));
      copy(row_scales(part), result.scale.view().slice(0, begin, end));
    } else {
      copy(DenseWeight(part, dtype), result.weight.view().slice(0, begin, end));
    }
    begin = end;
  }
  set_projection(parts[0].name, quantized ? group_width(parts[0]) : 0, result);
  return result;
}

OwnedProjection rows_of_heads(const Projection& p, std::int64_t heads, std::int64_t begin,
                              std::int64_t end) {
  const std::int64_t head_rows = p.weight.shape[0] / heads;
  const auto gathered = [&](const TensorView& matrix) {
    Tensor rows = Tensor::empty(matrix.dtype, {heads * (end - begin), matrix.shape[1]});
    copy(matrix.split(0, heads, head_rows).slice(1, begin, end),
         rows.view().split(0, heads, end - begin));
    return rows;
  };
  OwnedProjection result;
  result.weight = gathered(p.weight);
  if (p.is_quantized()) result.scale = gathered(row_scales(p));
  set_projection(p.name, p.is_quantized() ? group_width(p) : 0, result);
  return result;
}

}  // namespace fovea
