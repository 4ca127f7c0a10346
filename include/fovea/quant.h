// Codecs over groups of values that share one scale. A group may be a whole tensor, a channel, a
// token or a block of weights: what is grouped is the caller's choice.
#pragma once

#include <cstddef>
#include <span>

#include "fovea/dtype.h"

namespace fovea {

/// True for i8, i4, f8e4m3fn, f8e5m2 and f4e2m1: what a group may be stored as.
bool is_quantized_dtype(DType dtype);

/// The largest magnitude that a scale maps to: 127 for i8, 7 for i4, 448, 57344 and 6 for the
/// floats. Throws Error(invalid_argument) for other dtypes, as do all functions below.
float largest_code_value(DType dtype);

/// The scale that maps the largest finite magnitude of `values` to largest_code_value(). At least
/// the smallest normal float32, so that it and its inverse are finite and a group of zeros stays
/// zeros. Infinities have no say. NaN when a value is NaN and the dtype has no code for it: a NaN
/// spoils its group rather than being hidden.
float group_scale(DType dtype, std::span<const float> values);

/// codes[i] = values[i] / scale: the float32 quotient, rounded to nearest with ties to even and
/// saturated (i8 to [-128, 127], i4 to [-8, 7], floats to their largest finite value, infinities
/// too). A NaN quotient gives NaN in the 8-bit floats, 0 in integers and +6 in f4e2m1. 4-bit codes
/// lie two per byte, low nibble first; an odd count leaves the last high nibble zero.
/// `codes` holds bytes_of(dtype, values.size()); `scale` is positive and finite, or NaN.
void quantize_group(DType dtype, std::span<const float> values, float scale,
                    std::span<std::byte> codes);

/// values[i] = codes[i] * scale, in float32.
void dequantize_group(DType dtype, std::span<const std::byte> codes, float scale,
                      std::span<float> values);

}  // namespace fovea
