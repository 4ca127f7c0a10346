#include "layers/rows.h"

#include <string>

#include "core/check.h"
#include "ops/dispatch.h"

namespace fovea {
namespace {

bool has_shape(const TensorView& view, std::initializer_list<std::int64_t> shape) {
  if (view.ndim != static_cast<int>(shape.size())) return false;
  std::size_t d = 0;
  for (std::int64_t extent : shape) {
    if (view.shape[d++] != extent) return false;
  }
  return true;
}

[[noreturn]] void fail_shape(const char* name, const TensorView& view, DType dtype,
                             std::initializer_list<std::int64_t> shape, const char* more) {
  std::string wanted;
  for (std::int64_t extent : shape) {
    wanted += (wanted.empty() ? "" : ", ") + std::to_string(extent);
  }
  fail(ErrorCode::invalid_argument, "{} is {}, but must be {}[{}]{}", name,
       view.data != nullptr ? to_string(view) : "absent", name_of(dtype), wanted, more);
}

bool has_elements_or_data(const TensorView& view) { return view.data || view.numel() == 0; }

}  // namespace

void fill_zero(const OpContext& ctx, const TensorView& view) {
  write_padding_rows(ctx, 0, view.ndim == 2 ? view.split(1, 1, view.shape[1]) : view, {});
}

Tensor sinks_in_f32(const TensorView& sinks, const MemorySource& memory) {
  if (!sinks) return {};
  Tensor result = Tensor::empty(DType::f32, {sinks.shape[0]}, memory);
  result.assign(sinks);
  return result;
}

void check_shape(const char* name, const TensorView& view, DType dtype,
                 std::initializer_list<std::int64_t> shape) {
  if (has_shape(view, shape) && view.dtype == dtype && has_elements_or_data(view)) return;
  fail_shape(name, view, dtype, shape, "");
}

void check_any_dtype(const char* name, const TensorView& view,
                     std::initializer_list<std::int64_t> shape) {
  check_shape(name, view, is_compute_dtype(view.dtype) ? view.dtype : DType::f32, shape);
}

void check_rows(const char* name, const TensorView& view, DType dtype,
                std::initializer_list<std::int64_t> shape) {
  check_shape(name, view, dtype, shape);
  const auto last = static_cast<std::size_t>(view.ndim - 1);
  if (view.strides[last] == 1 || view.shape[last] == 1) return;
  fail_shape(name, view, dtype, shape, " with unit innermost stride");
}

void check_indices(const char* name, const TensorView& view, std::int64_t count) {
  if (has_shape(view, {count}) && (view.dtype == DType::i32 || view.dtype == DType::i64)) return;
  fail(ErrorCode::invalid_argument, "{} is {}, but must be i32[{}] or i64[{}]", name,
       view.data != nullptr ? to_string(view) : "absent", count, count);
}

}  // namespace fovea
