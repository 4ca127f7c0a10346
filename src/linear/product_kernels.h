// What a GPU does beside a product: codes of weights and inputs, bias, low-rank updates.
#pragma once

#include <cuda_runtime_api.h>

#include "fovea/linear.h"

namespace fovea::cuda {

/// Weights of heads in device memory; value = code * scale of its group, in float32.
struct DeviceCodes {
  TensorView codes;     ///< u8 [N, M, K], f8e4m3fn; or [N, M, K / 2], f4e2m1, low nibble first.
  TensorView scales;    ///< f32 [N, groups of M, groups of K]
  WeightGroups groups;  ///< Extents: no 0.
  bool is_mxfp4 = false;
};

/// values [N, M, K], contiguous, each rounded once to its dtype.
void decode_codes(const DeviceCodes& codes, const TensorView& values, cudaStream_t stream);

/// Tokens up to which reading codes more than once costs less than decoding them first.
constexpr std::int64_t kFewRows = 64;
/// Whether multiply_few_rows takes x of `tokens` rows: at most kFewRows, of a 16-bit dtype, FP8
/// codes of up to 65535 heads, and the depth and its groups multiples of 64.
bool multiplies_few_rows(const DeviceCodes& weight, DType dtype, std::int64_t tokens);
/// out[t, n] = x[t, n] W[n] + bias, out [T, N, M] of x's dtype, bias [M] or absent. Codes are
/// exact, sums f32.
void multiply_few_rows(const DeviceCodes& weight, const TensorView& x, const TensorView& bias,
                       const TensorView& out, cudaStream_t stream);

/// rounded [T, N, K], contiguous, becomes what FP8 keeps of x [T, N, K]: codes of groups of
/// `group` channels times the scale that takes the group's largest finite magnitude to the largest
/// code, rounded to the dtype.
void round_to_fp8(const TensorView& x, std::int64_t group, const TensorView& rounded,
                  cudaStream_t stream);

/// Rows of out [T, M], unit innermost stride, become bias [M], of the same dtype.
void fill_rows(const TensorView& bias, const TensorView& out, cudaStream_t stream);

}  // namespace fovea::cuda
