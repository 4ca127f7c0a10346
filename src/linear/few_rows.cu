// Products of a few tokens with FP8 codes: a decode step's time is the reading of its weights, and
// decoding them first would move five bytes for one. Codes come from memory once; further sets of
// 16 tokens find them in L2.
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "core/cuda_device.h"
#include "core/cuda_mma.cuh"
#include "linear/product_kernels.h"

namespace fovea::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kRows = 32;   ///< Outputs of a warp: two tiles of 16.
constexpr int kDepth = 64;  ///< Of a step of a warp: 16 bytes a lane of each of its rows.
constexpr int kAhead = 2;   ///< Steps under way.

/// Two codes as a pair of T, exactly.
template <class T>
__device__ __forceinline__ std::uint32_t decode_pair(std::uint32_t codes) {
  const __half2_raw raw =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  const __half2 halves(raw);
  if constexpr (std::is_same_v<T, __half>) {
    return reinterpret_cast<const std::uint32_t&>(halves);
  } else {
    const float2 wide = __half22float2(halves);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(wide.x, wide.y);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

struct FewRows {
  DeviceCodes weight;
  TensorView x, out;   ///< [T, N, K], [T, N, M]
  bool aligned;        ///< Rows of x, to 16 bytes.
  const void* bias;    ///< [M] of the dtype, or null.
  int warps_of_depth;  ///< Of a block; the others take more outputs.
};

/// 16 elements of a row.
__device__ __forceinline__ void load_row(uint4 (&to)[2], const std::uint16_t* row, bool aligned) {
  if (aligned) {
    to[0] = __ldg(reinterpret_cast<const uint4*>(row));
    to[1] = __ldg(reinterpret_cast<const uint4*>(row) + 1);
    return;
  }
  const auto pair = [&](int i) {
    return __ldg(row + 2 * i) | std::uint32_t{__ldg(row + 2 * i + 1)} << 16;
  };
  to[0] = {pair(0), pair(1), pair(2), pair(3)};
  to[1] = {pair(4), pair(5), pair(6), pair(7)};
}

/// What a lane, with g = lane / 4 and c = lane % 4, needs of a step: channels 16 c to 16 c + 15 of
/// four rows of codes and of a token of each tile. Products take them four at a time, the same on
/// both sides, in place of the channels 2 c, 2 c + 1, 2 c + 8 and 2 c + 9.
template <int kTiles>
struct Step {
  uint4 codes[4];  ///< Rows g, g + 8, g + 16, g + 24.
  float scale[4];
  uint4 x[kTiles][2] = {};  ///< Tokens g and, of the next tile, g + 8.
};

__device__ __forceinline__ std::uint32_t word(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

/// A warp's product of kRows outputs and kTiles tiles of 8 tokens.
template <class T, int kTiles>
class RowProduct {
 public:
  __device__ RowProduct(const FewRows& p, std::int64_t first_row, std::int64_t first_token)
      : steps_of_group_(static_cast<std::uint32_t>(p.weight.groups.in / kDepth)),
        aligned_(p.aligned) {
    const std::int64_t head = blockIdx.y, columns = p.out.shape[2], depth = p.x.shape[2];
    const std::int64_t groups = p.weight.scales.shape[2];
    const int lane = threadIdx.x % 32, channel = lane % 4 * 16;
    codes_ = static_cast<const std::uint8_t*>(p.weight.codes.data) + head * columns * depth +
             channel;
    scales_ =
        static_cast<const float*>(p.weight.scales.data) + head * p.weight.scales.shape[1] * groups;
    for (int i = 0; i < 4; ++i) {
      // Rows past the last are read as the last, and not stored.
      const std::int64_t row = min(first_row + lane / 4 + 8 * i, columns - 1);
      code_at_[i] = row * depth;
      scale_at_[i] = row / p.weight.groups.out * groups;
    }
    for (int i = 0; i < kTiles; ++i) {
      const std::int64_t token = first_token + lane / 4 + 8 * i;
      x_[i] = token >= p.x.shape[0] ? nullptr
                                    : static_cast<const std::uint16_t*>(p.x.data) +
                                          token * p.x.strides[0] + head * p.x.strides[1] + channel;
    }
  }

  __device__ __forceinline__ void load(Step<kTiles>& step, std::uint32_t index) const {
    const std::uint32_t group = index / steps_of_group_;
    const std::int64_t depth = std::int64_t{index} * kDepth;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      step.codes[i] = __ldg(reinterpret_cast<const uint4*>(codes_ + code_at_[i] + depth));
      step.scale[i] = __ldg(scales_ + scale_at_[i] + group);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (x_[i] != nullptr) load_row(step.x[i], x_[i] + depth, aligned_);
    }
  }

  __device__ __forceinline__ void add(const Step<kTiles>& step) {
    float part[2][kTiles][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const std::uint32_t upper = word(step.codes[2 * tile], k);
        const std::uint32_t lower = word(step.codes[2 * tile + 1], k);
        const std::uint32_t a[4] = {decode_pair<T>(upper & 0xffff), decode_pair<T>(lower & 0xffff),
                                    decode_pair<T>(upper >> 16), decode_pair<T>(lower >> 16)};
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const uint4& x = step.x[i][k / 2];
          ptx::mma<T>(part[tile][i], a, word(x, k % 2 * 2), word(x, k % 2 * 2 + 1));
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) {
        float& sum = sum_[tile][i / 4][i % 4];
        sum = fmaf(part[tile][i / 4][i % 4], step.scale[2 * tile + i % 4 / 2], sum);
      }
    }
  }

  /// To sums [8 kTiles][kRows].
  __device__ __forceinline__ void store(float* sums) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int row = tile * 16 + i % 4 / 2 * 8 + lane / 4;
        sums[token * kRows + row] = sum_[tile][i / 4][i % 4];
      }
    }
  }

 private:
  std::uint32_t steps_of_group_;
  bool aligned_;
  const std::uint8_t* codes_;
  const float* scales_;
  std::int64_t code_at_[4], scale_at_[4];
  const std::uint16_t* x_[kTiles];
  float sum_[2][kTiles][4] = {};
};

/// Warps of a block share out the depth, then outputs. Grid: sets of tokens, the fastest, so that
/// codes are read from memory once, times sets of outputs; N.
template <class T, int kTiles>
__global__ void __launch_bounds__(kWarps * 32, kTiles == 1 ? 2 : 1) few_rows_kernel(FewRows p) {
  constexpr int kTokens = 8 * kTiles;
  __shared__ float sums[kWarps][kTokens * kRows];
  const int warp = threadIdx.x / 32, sets = kWarps / p.warps_of_depth;
  const std::int64_t token_sets = (p.x.shape[0] + kTokens - 1) / kTokens;
  const std::int64_t first_token = blockIdx.x % token_sets * kTokens;
  const std::int64_t first_row = blockIdx.x / token_sets * sets * kRows;
  const auto steps = static_cast<std::uint32_t>(p.x.shape[2] / kDepth);
  const std::uint32_t part = warp % p.warps_of_depth;
  std::uint32_t step = steps * part / p.warps_of_depth;
  const std::uint32_t end = steps * (part + 1) / p.warps_of_depth;
  RowProduct<T, kTiles> product(p, first_row + warp / p.warps_of_depth * kRows, first_token);
  Step<kTiles> ring[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (step + i < end) product.load(ring[i], step + i);
  }
  for (; step < end; step += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (step + i >= end) break;
      product.add(ring[i]);
      if (step + i + kAhead < end) product.load(ring[i], step + i + kAhead);
    }
  }
  product.store(sums[warp]);
  __syncthreads();
  for (int i = threadIdx.x; i < sets * kTokens * kRows; i += kWarps * 32) {
    const int set = i / (kTokens * kRows), at = i % (kTokens * kRows);
    const std::int64_t token = first_token + at / kRows;
    const std::int64_t row = first_row + set * kRows + at % kRows;
    if (token >= p.out.shape[0] || row >= p.out.shape[2]) continue;
    float sum = p.bias == nullptr ? 0.f : static_cast<float>(static_cast<const T*>(p.bias)[row]);
    for (int n = 0; n < p.warps_of_depth; ++n) sum += sums[set * p.warps_of_depth + n][at];
    static_cast<T*>(p.out.data)[token * p.out.strides[0] + blockIdx.y * p.out.strides[1] + row] =
        static_cast<T>(sum);
  }
}

template <class T>
void launch(const FewRows& p, cudaStream_t stream) {
  const std::int64_t tokens = p.x.shape[0], tiles = tokens <= 8 ? 1 : 2;
  const std::int64_t rows = kRows * kWarps / p.warps_of_depth;
  const dim3 grid(static_cast<unsigned>((tokens + 8 * tiles - 1) / (8 * tiles) *
                                        ((p.out.shape[2] + rows - 1) / rows)),
                  static_cast<unsigned>(p.x.shape[1]));
  const auto kernel = tiles == 1 ? few_rows_kernel<T, 1> : few_rows_kernel<T, 2>;
  kernel<<<grid, kWarps * 32, 0, stream>>>(p);
}

bool is_aligned(const TensorView& x) {
  const auto bytes = static_cast<std::uintptr_t>((x.strides[0] | x.strides[1]) * 2);
  return (reinterpret_cast<std::uintptr_t>(x.data) | bytes) % 16 == 0;
}

}  // namespace

bool multiplies_few_rows(const DeviceCodes& weight, DType dtype, std::int64_t tokens) {
  constexpr std::int64_t kMaxHeads = 65535;  // The second dimension of a grid.
  return !weight.is_mxfp4 && dtype != DType::f32 && tokens <= kFewRows &&
         weight.codes.shape[0] <= kMaxHeads && weight.codes.shape[2] % kDepth == 0 &&
         weight.groups.in % kDepth == 0;
}

void multiply_few_rows(const DeviceCodes& weight, const TensorView& x, const TensorView& bias,
                       const TensorView& out, cudaStream_t stream) {
  FewRows p{.weight = weight,
            .x = x,
            .out = out,
            .aligned = is_aligned(x),
            .bias = bias ? bias.data : nullptr,
            .warps_of_depth = kWarps};
  const std::int64_t steps = x.shape[2] / kDepth;
  while (p.warps_of_depth > 1 && steps / p.warps_of_depth < kAhead) p.warps_of_depth /= 2;
  if (x.dtype == DType::f16) {
    launch<__half>(p, stream);
  } else {
    launch<__nv_bfloat16>(p, stream);
  }
  check(cudaGetLastError(), "multiply_few_rows");
}

}  // namespace fovea::cuda
