#include "linear/codes_on_device.h"

#include <limits>

#include "core/cuda_device.h"
#include "quant/codes.h"

namespace fovea::cuda {
namespace {

using E4m3 = FloatCode<Float8E4M3FN>;
using E2m1 = FloatCode<Float4E2M1>;

constexpr int kThreads = 256;

/// A block per row of W: codes of neighbours are read by neighbours.
template <class T>
__global__ void decode_kernel(DeviceCodes from, T* values, std::int64_t columns,
                              std::int64_t depth) {
  const std::int64_t row = blockIdx.x;  // Of all heads.
  const std::int64_t head = row / columns, group_row = row % columns / from.groups.out;
  const auto* codes =
      static_cast<const std::uint8_t*>(from.codes.data) + row * from.codes.shape[2];
  const auto* scales = static_cast<const float*>(from.scales.data) +
                       (head * from.scales.shape[1] + group_row) * from.scales.shape[2];
  for (std::int64_t k = threadIdx.x; k < depth; k += kThreads) {
    const float code = from.is_mxfp4 ? E2m1::decode(codes[k / 2] >> (k % 2 * 4) & 0xf)
                                     : E4m3::decode(codes[k]);
    values[row * depth + k] = narrow<T>(code * scales[k / from.groups.in]);
  }
}

/// A block per token and head, a warp per group.
template <class T>
__global__ void round_kernel(TensorView x, std::int64_t group, T* rounded) {
  const std::int64_t t = blockIdx.x / x.shape[1], n = blockIdx.x % x.shape[1];
  const std::int64_t depth = x.shape[2];
  const T* from = static_cast<const T*>(x.data) + t * x.strides[0] + n * x.strides[1];
  T* to = rounded + blockIdx.x * depth;
  const int lane = threadIdx.x % 32;
  for (std::int64_t begin = threadIdx.x / 32 * group; begin < depth;
       begin += kThreads / 32 * group) {
    const std::int64_t end = begin + group < depth ? begin + group : depth;
    float amax = 0.f;
    for (std::int64_t k = begin + lane; k < end; k += 32) {
      const float value = fabsf(widen(from[k]));
      if (isfinite(value)) amax = fmaxf(amax, value);
    }
    for (int step = 16; step > 0; step /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
    }
    const float scale = fmaxf(amax / E4m3::kLargest, std::numeric_limits<float>::min());
    for (std::int64_t k = begin + lane; k < end; k += 32) {
      to[k] = narrow<T>(E4m3::decode(E4m3::encode(widen(from[k]) / scale)) * scale);
    }
  }
}

unsigned grid_of(std::int64_t blocks) {
  FOVEA_CHECK(blocks <= std::numeric_limits<std::int32_t>::max(), unsupported,
              "{} rows and heads are more than a launch takes, 2^31 - 1", blocks);
  return static_cast<unsigned>(blocks);
}

/// launch(T{}) with T the element type of `dtype`.
template <class Launch>
void with_type(DType dtype, Launch&& launch) {
  switch (dtype) {
    case DType::f16:
      return launch(Float16{});
    case DType::bf16:
      return launch(BFloat16{});
    default:
      return launch(float{});
  }
}

}  // namespace

void decode_codes(const DeviceCodes& codes, const TensorView& values, cudaStream_t stream) {
  const std::int64_t columns = values.shape[1], depth = values.shape[2];
  with_type(values.dtype, [&]<class T>(T) {
    decode_kernel<<<grid_of(values.shape[0] * columns), kThreads, 0, stream>>>(
        codes, static_cast<T*>(values.data), columns, depth);
  });
  check(cudaGetLastError(), "decode_codes");
}

void round_to_fp8(const TensorView& x, std::int64_t group, const TensorView& rounded,
                  cudaStream_t stream) {
  with_type(x.dtype, [&]<class T>(T) {
    round_kernel<<<grid_of(x.shape[0] * x.shape[1]), kThreads, 0, stream>>>(
        x, group, static_cast<T*>(rounded.data));
  });
  check(cudaGetLastError(), "round_to_fp8");
}

}  // namespace fovea::cuda
