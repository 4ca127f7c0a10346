// The end of a job: the warps' results become the block's, and those of several blocks the job's.
#pragma once

#include "backends/cuda/sm90/attention_decode/attend.cuh"

namespace fovea::cuda::decode {

/// Writes channels 8 j + 2 c and the next of two rows; `value` has them as MergedValue does. Where
/// nothing is visible zeros. The head's sink joins the denominator here and only here.
template <typename T>
__device__ __forceinline__ void store_channels(const KernelParams& k, const JobRows& rows, int j,
                                               const float4& value, const float2& max,
                                               const float2& sum) {
  const int lane = threadIdx.x % 32;
  const int channel = 8 * j + lane % 4 * 2;
  if (channel >= k.op.v_dim) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int32_t row = lane / 4 + 8 * r;
    if (row >= rows.num_rows) continue;
    const std::int32_t head = rows.head(row);
    const float total = r == 0 ? sum.x : sum.y, top = r == 0 ? max.x : max.y;
    float denominator = total;
    if (k.op.sinks != nullptr) {
      denominator += exp2_approx(__ldg(k.op.sinks + head) * kLog2e - top);
    }
    const float factor = total == 0.f ? 0.f : 1.f / denominator;
    const float a = (r == 0 ? value.x : value.y) * factor;
    const float b = (r == 0 ? value.z : value.w) * factor;
    const std::int64_t out_row = std::int64_t{rows.query_begin} + rows.token(row);
    const std::int64_t at = out_row * k.op.out_row_stride + head * k.op.out_head_stride + channel;
    if (k.op.out_type == ElementType::f32) {
      *reinterpret_cast<float2*>(static_cast<float*>(k.op.out) + at) = float2{a, b};
    } else {
      *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(k.op.out) + at) =
          pack<T>(a, b);
    }
    if (channel == 0 && k.op.lse != nullptr) {
      k.op.lse[head * k.op.lse_head_stride + out_row * k.op.lse_row_stride] =
          total == 0.f ? -INFINITY : (top + log2f(total)) * kLn2;
    }
  }
}

/// Merges the warps' results into the first warp's outputs.
template <typename W>
__device__ __forceinline__ void merge_warps(SharedMemory<W>& s, Attention<W>& attention,
                                            float2& max, float2& sum) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Softmax& softmax = attention.softmax;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float own = sum_of_quad(softmax.sum[r]);
    // The maximum passes over a NaN; a merge must not take its row for an empty one.
    if (isnan(own)) softmax.max[r] = own;
    if (lane % 4 == 0) {
      s.max[warp][lane / 4 + 8 * r] = softmax.max[r];
      s.sum[warp][lane / 4 + 8 * r] = own;
    }
  }
  __syncthreads();
  float top[2], total[2], weight[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    top[r] = -INFINITY;
    total[r] = 0.f;
    for (int w = 0; w < kWarps; ++w) {
      const float m = s.max[w][row];
      top[r] = m > top[r] || isnan(m) ? m : top[r];
    }
    for (int w = 0; w < kWarps; ++w) {
      total[r] += split_kv::merge_weight(s.max[w][row], top[r]) * s.sum[w][row];
    }
    weight[r] = split_kv::merge_weight(softmax.max[r], top[r]);
  }
  max = float2{top[0], top[1]};
  sum = float2{total[0], total[1]};
#pragma unroll
  for (int i = 0; i < W::kDim / 2; ++i) attention.out[i] *= weight[i / 2 % 2];
  // Two warps take the others' outputs, then one the other's, in the place that this one has read.
#pragma unroll
  for (int takers = kWarps / 2; takers > 0; takers /= 2) {
    const int place = warp % takers + kWarps / 2 - takers;
    if (warp / takers == 1) {
#pragma unroll
      for (int j = 0; j < W::kDim / 8; ++j) {
        const float* o = attention.out + 4 * j;
        s.merge[place][j][lane] = float4{o[0], o[1], o[2], o[3]};
      }
    }
    __syncthreads();
    if (warp / takers == 0) {
#pragma unroll
      for (int j = 0; j < W::kDim / 8; ++j) {
        const float4 other = s.merge[place][j][lane];
        float* o = attention.out + 4 * j;
        o[0] += other.x, o[1] += other.y, o[2] += other.z, o[3] += other.w;
      }
    }
  }
}

/// Of several blocks that share a job the last to come merges.
template <typename W>
__device__ void merge_blocks(const KernelParams& k, const JobRows& rows,
                             const split_kv::JobPieces& pieces, SharedMemory<W>& s) {
  __syncthreads();
  std::uint32_t* counter = k.counters + pieces.first_slot;
  if (threadIdx.x == 0) {
    const bool is_last =
        ptx::count_arrival(counter) == static_cast<std::uint32_t>(pieces.count - 1);
    if (is_last) *counter = 0;  // Ready for the next launch.
    s.last_arriver = is_last;
  }
  __syncthreads();
  if (!s.last_arriver) return;
  const int lane = threadIdx.x % 32;
  for (int j = threadIdx.x / 32; j < W::kDim / 8; j += kWarps) {
    const split_kv::MergedValue merged = split_kv::merge_values<8>(
        pieces.count,
        [&](int i, float2& max, float2& sum) {
          const float* at = k.partial_stats + pieces.slot(i) * (2 * kRows) + lane / 4;
          max = float2{__ldcg(at), __ldcg(at + 8)};
          sum = float2{__ldcg(at + kRows), __ldcg(at + kRows + 8)};
        },
        [&](int i) {
          return __ldcg(k.partial_out + (pieces.slot(i) * (W::kDim / 8) + j) * 32 + lane);
        });
    store_channels<typename W::T>(k, rows, j, merged.value, merged.max, merged.sum);
  }
}

/// Run by all threads when the block has done its share of a job.
template <typename W>
__device__ __forceinline__ void finish(const KernelParams& k, const JobShare& share,
                                       const split_kv::RangeWalk& walk, const JobRows& rows,
                                       SharedMemory<W>& s, Attention<W>& attention) {
  float2 max, sum;
  merge_warps<W>(s, attention, max, sum);
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
#pragma unroll
    for (int j = 0; j < W::kDim / 8; ++j) {
      const float* o = attention.out + 4 * j;
      const float4 value{o[0], o[2], o[1], o[3]};
      if (share.whole) {
        store_channels<typename W::T>(k, rows, j, value, max, sum);
      } else {
        __stcg(k.partial_out + (share.slot * (W::kDim / 8) + j) * 32 + lane, value);
      }
    }
    if (!share.whole && lane % 4 == 0) {
      float* at = k.partial_stats + share.slot * (2 * kRows) + lane / 4;
      __stcg(at, max.x);
      __stcg(at + 8, max.y);
      __stcg(at + kRows, sum.x);
      __stcg(at + kRows + 8, sum.y);
    }
  }
  if (share.whole) return;
  merge_blocks<W>(k, rows, {share.first_unit, share.num_units, walk}, s);
}

}  // namespace fovea::cuda::decode
