// Small things that layers do with views of rows.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "fovea/op_context.h"

namespace fovea {

/// What any product of two dims of one layer stays below in 64 bits, with room for a third.
inline constexpr std::int64_t kMaxDim = std::int64_t{1} << 20;

/// All elements of a view [T, D] or [T, N, D] become zero.
void fill_zero(const OpContext& ctx, const TensorView& view);

/// A copy of sinks [N], converted to f32; absent of an absent view.
Tensor sinks_in_f32(const TensorView& sinks, const MemorySource& memory);

/// Throws Error(invalid_argument) unless `view` is there, of `dtype`, with these extents.
void check_shape(const char* name, const TensorView& view, DType dtype,
                 std::initializer_list<std::int64_t> shape);
/// The same in any compute dtype.
void check_any_dtype(const char* name, const TensorView& view,
                     std::initializer_list<std::int64_t> shape);
/// check_shape with unit innermost stride.
void check_rows(const char* name, const TensorView& view, DType dtype,
                std::initializer_list<std::int64_t> shape);
/// i32 or i64.
void check_indices(const char* name, const TensorView& view, std::int64_t count);

}  // namespace fovea
