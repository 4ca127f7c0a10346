// Small things that layers do with views of rows.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "fovea/tensor.h"

namespace fovea {

/// All elements of a view [T, ..., D] with unit innermost stride become zero.
void fill_zero(const TensorView& view);

/// Throws Error(invalid_argument) unless `view` is there, of `dtype`, with these extents.
void check_shape(const char* name, const TensorView& view, DType dtype,
                 std::initializer_list<std::int64_t> shape);
/// The same with unit innermost stride.
void check_rows(const char* name, const TensorView& view, DType dtype,
                std::initializer_list<std::int64_t> shape);
/// i32 or i64.
void check_indices(const char* name, const TensorView& view, std::int64_t count);

}  // namespace fovea
