#include "linear/product_kernels.h"

#include <limits>

#include "core/cuda_device.h"
#include "linear/lora.h"
#include "quant/codes.h"

namespace fovea::cuda {
namespace {

using E4m3 = FloatCode<Float8E4M3FN>;
using E2m1 = FloatCode<Float4E2M1>;

constexpr int kThreads = 256;

/// What a thread decodes at a time.
template <int kCodes, int kBits>
struct alignas(kCodes * kBits / 8) CodePiece {
  std::uint8_t bytes[kCodes * kBits / 8];
};
template <class T, int kCodes>
struct alignas(kCodes == 1 ? sizeof(T) : 16) ValuePiece {
  T values[kCodes];
};

/// A block per row of W. Groups and rows are multiples of kCodes, of FP4 an even number.
template <class T, int kCodes, int kBits>
__global__ void decode_kernel(DeviceCodes from, T* values, std::uint32_t columns,
                              std::uint32_t depth) {
  using Codes = CodePiece<kCodes, kBits>;
  using Values = ValuePiece<T, kCodes>;
  const std::uint32_t row = blockIdx.x;  // Of all heads.
  const std::uint32_t head = row / columns;
  const std::int64_t group_row = row % columns / from.groups.out;
  const auto* codes = reinterpret_cast<const Codes*>(
      static_cast<const std::uint8_t*>(from.codes.data) + row * from.codes.shape[2]);
  const auto* scales = static_cast<const float*>(from.scales.data) +
                       (head * from.scales.shape[1] + group_row) * from.scales.shape[2];
  auto* to = reinterpret_cast<Values*>(values + std::int64_t{row} * depth);
  const auto group = static_cast<std::uint32_t>(from.groups.in);
  for (std::uint32_t i = threadIdx.x; i < depth / kCodes; i += kThreads) {
    const Codes piece = codes[i];
    const float scale = scales[i * kCodes / group];
    Values decoded;
#pragma unroll
    for (int k = 0; k < kCodes; ++k) {
      const float code = kBits == 4 ? E2m1::decode(piece.bytes[k / 2] >> (k % 2 * 4) & 0xf)
                                    : E4m3::decode(piece.bytes[k]);
      decoded.values[k] = narrow<T>(code * scale);
    }
    to[i] = decoded;
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

/// A block per row; bits are copied.
template <class T>
__global__ void fill_kernel(const T* bias, T* out, std::int64_t stride, std::int64_t columns) {
  T* const row = out + blockIdx.x * stride;
  for (std::int64_t m = threadIdx.x; m < columns; m += kThreads) row[m] = bias[m];
}

/// Element [d] of column c of panels of `depth`, see PanelProduct.
__device__ float panel_element(const float* panels, std::int64_t depth, std::int64_t c,
                               std::int64_t d) {
  return panels[(c / kPanelColumns * depth + d) * kPanelColumns + c % kPanelColumns];
}

/// A block per token; `low` are the values between A and B, a warp for each in turn.
template <class T>
__global__ void low_rank_kernel(LoraOnDevice lora, TensorView x, TensorView ids, TensorView out) {
  extern __shared__ float low[];
  const std::int64_t t = blockIdx.x;
  const std::int32_t id = static_cast<const std::int32_t*>(ids.data)[t * ids.strides[0]];
  if (id < 0 || id >= lora.num_adapters) return;
  const LoraOnDevice::Adapter adapter = lora.adapters[id];
  const T* const from = static_cast<const T*>(x.data) + t * x.strides[0];
  T* const to = static_cast<T*>(out.data) + t * out.strides[0];
  const int lane = threadIdx.x % 32;
  for (std::int64_t r = threadIdx.x / 32; r < adapter.rank; r += kThreads / 32) {
    float sum = 0.f;
    for (std::int64_t d = lane; d < x.shape[1]; d += 32) {
      sum += widen(from[d]) * panel_element(adapter.a, x.shape[1], r, d);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) low[r] = sum;
  }
  __syncthreads();
  for (std::int64_t u = 0; u < adapter.num_updates; ++u) {
    const LoraOnDevice::Update update = lora.updates[adapter.first_update + u];
    for (std::int64_t c = threadIdx.x; c < update.columns; c += kThreads) {
      float sum = 0.f;
      for (std::int64_t r = 0; r < update.rank; ++r) {
        sum += low[update.first_rank + r] * panel_element(update.b, update.rank, c, r);
      }
      T& element = to[update.first_column + c];
      element = narrow<T>(widen(element) + sum);
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
  const auto columns = static_cast<std::uint32_t>(values.shape[1]);
  const auto depth = static_cast<std::uint32_t>(values.shape[2]);
  const bool in_pieces = (values.shape[2] | codes.groups.in) % 8 == 0;
  with_type(values.dtype, [&]<class T>(T) {
    const auto kernel = codes.is_mxfp4 ? decode_kernel<T, 8, 4>  // Of whole groups of 32.
                        : in_pieces    ? decode_kernel<T, 8, 8>
                                       : decode_kernel<T, 1, 8>;
    kernel<<<grid_of(values.shape[0] * values.shape[1]), kThreads, 0, stream>>>(
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

void fill_rows(const TensorView& bias, const TensorView& out, cudaStream_t stream) {
  with_type(out.dtype, [&]<class T>(T) {
    fill_kernel<<<grid_of(out.shape[0]), kThreads, 0, stream>>>(
        static_cast<const T*>(bias.data), static_cast<T*>(out.data), out.strides[0], out.shape[1]);
  });
  check(cudaGetLastError(), "fill_rows");
}

}  // namespace fovea::cuda

namespace fovea {

void add_low_rank(const ExecutionContext& ctx, const LoraOnDevice& lora, const TensorView& x,
                  const TensorView& ids, const TensorView& out) {
  const cuda::CurrentDevice current(ctx.memory.device);
  const auto shared = static_cast<std::size_t>(lora.max_rank) * sizeof(float);
  cuda::with_type(x.dtype, [&]<class T>(T) {
    cuda::low_rank_kernel<T><<<cuda::grid_of(x.shape[0]), cuda::kThreads, shared,
                               cuda::stream_of(ctx)>>>(lora, x, ids, out);
  });
  cuda::check(cudaGetLastError(), "add_low_rank");
}

}  // namespace fovea
