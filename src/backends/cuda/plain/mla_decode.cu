#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "backends/cuda/plain/mla_decode.h"

namespace fovea::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxPerLane = 32;  ///< Channels of a row that one lane holds.
constexpr int kMaxDim = 32 * kMaxPerLane;

__device__ float load(const void* base, ElementType type, std::int64_t at) {
  switch (type) {
    case ElementType::f16:
      return __half2float(static_cast<const __half*>(base)[at]);
    case ElementType::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[at]);
    default:
      return static_cast<const float*>(base)[at];
  }
}

__device__ void store(void* base, ElementType type, std::int64_t at, float value) {
  switch (type) {
    case ElementType::f16:
      static_cast<__half*>(base)[at] = __float2half_rn(value);
      break;
    case ElementType::bf16:
      static_cast<__nv_bfloat16*>(base)[at] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<float*>(base)[at] = value;
  }
}

/// Channel d of the cache row that begins at `row` (elements of a dense cache, otherwise bytes).
__device__ float cache_element(const MlaDecodeParams& p, std::int64_t row, int d) {
  if (p.cache_format == CacheFormat::dense) return load(p.cache, p.cache_type, row + d);
  const auto* bytes = static_cast<const std::uint8_t*>(p.cache) + row;
  if (p.cache_format == CacheFormat::fp8_e4m3) {
    const __half_raw half = __nv_cvt_fp8_to_halfraw(bytes[d], __NV_E4M3);
    return __half2float(__half(half)) * p.cache_scale;
  }
  const int channels = p.latent_dim + p.rope_dim;
  const bool bytewise = p.cache_format == CacheFormat::int8_per_token;
  const auto* scales = reinterpret_cast<const float*>(bytes + (bytewise ? channels : channels / 2));
  const float scale = scales[d < p.latent_dim ? 0 : 1];
  if (bytewise) return static_cast<float>(static_cast<std::int8_t>(bytes[d])) * scale;
  const int nibble = bytes[d / 2] >> (d % 2 * 4) & 15;
  return static_cast<float>((nibble ^ 8) - 8) * scale;
}

/// The request that owns `token`; num_requests when none does.
__device__ int request_of(const MlaDecodeParams& p, int token) {
  int low = 0, high = p.num_requests;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (p.query_start_loc[middle + 1] <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// One block per query token and head. A warp takes every fourth key and keeps its own maximum, sum
/// and output; a lane holds every 32nd channel. The warps' results are merged at the end.
__global__ void __launch_bounds__(kWarps * 32, 1) mla_decode_plain_kernel(MlaDecodeParams p) {
  __shared__ float warp_max[kWarps], warp_sum[kWarps];
  __shared__ float warp_out[kWarps][kMaxDim];
  const int token = blockIdx.x;
  const int head = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row_dim = p.latent_dim + p.rope_dim;

  const int request = request_of(p, token);
  int first = 0, visible = 0;
  if (request < p.num_requests) {
    const int position = p.seq_lens[request] - p.query_start_loc[request + 1] + token;
    visible = p.causal ? position + 1 : p.seq_lens[request];
    if (p.window_left >= 0) first = max(0, position - p.window_left);
  }

  float q[kMaxPerLane], out[kMaxPerLane];
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    const int d = lane + 32 * i;
    out[i] = 0.f;
    q[i] = 0.f;
    if (d < p.latent_dim) {
      q[i] = load(p.q_latent, p.query_type,
                  token * p.q_latent_token_stride + head * p.q_latent_head_stride + d);
    } else if (d < row_dim) {
      q[i] = load(p.q_pe, p.query_type,
                  token * p.q_pe_token_stride + head * p.q_pe_head_stride + d - p.latent_dim);
    }
  }
  float max = -INFINITY, sum = 0.f;
  for (int key = first + warp; key < visible; key += kWarps) {
    const std::int64_t block = p.block_table[request * p.block_table_stride + key / p.block_size];
    const std::int64_t row = block * p.cache_block_stride + key % p.block_size * p.cache_row_stride;
    float value[kMaxPerLane];
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      const int d = lane + 32 * i;
      value[i] = d < row_dim ? cache_element(p, row, d) : 0.f;
      dot += q[i] * value[i];
    }
    for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
    const float score = dot * p.sm_scale;
    const float new_max = fmaxf(max, score);
    // Where all scores so far are -inf, weigh against 0.
    const float base = new_max == -INFINITY ? 0.f : new_max;
    const float factor = expf(max - base);
    const float weight = expf(score - base);
    sum = sum * factor + weight;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) out[i] = out[i] * factor + weight * value[i];
    max = new_max;
  }
  if (lane == 0) {
    warp_max[warp] = max;
    warp_sum[warp] = sum;
  }
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    if (lane + 32 * i < p.latent_dim) warp_out[warp][lane + 32 * i] = out[i];
  }
  __syncthreads();
  max = -INFINITY;
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, warp_max[w]);
  const float base = max == -INFINITY ? 0.f : max;
  sum = 0.f;
  for (int w = 0; w < kWarps; ++w) sum += expf(warp_max[w] - base) * warp_sum[w];
  // The sink joins the denominator, not the lse.
  const float sink = p.sinks != nullptr ? expf(p.sinks[head] - base) : 0.f;
  for (int d = threadIdx.x; d < p.latent_dim; d += kWarps * 32) {
    float total = 0.f;
    for (int w = 0; w < kWarps; ++w) total += expf(warp_max[w] - base) * warp_out[w][d];
    store(p.out, p.out_type, token * p.out_token_stride + head * p.out_head_stride + d,
          sum == 0.f ? 0.f : total / (sum + sink));
  }
  if (threadIdx.x == 0 && p.lse != nullptr) {
    p.lse[head * p.lse_head_stride + token * p.lse_token_stride] =
        sum == 0.f ? -INFINITY : max + logf(sum);
  }
}

}  // namespace

const char* mla_decode_plain_declines(const MlaDecodeParams& p) {
  if (p.latent_dim + p.rope_dim > kMaxDim) return "rows are longer than 1024 elements";
  if (p.num_heads > 65535) return "more than 65535 heads";
  return nullptr;
}

cudaError_t mla_decode_plain(const MlaDecodeParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0 || p.num_heads == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(p.num_heads));
  mla_decode_plain_kernel<<<grid, kWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fovea::cuda
