// The end of a job: the warps' results become the block's, and those of several blocks the job's.
#pragma once

#include "backends/cuda/sm90/attention_decode/attend.cuh"

namespace fovea::cuda::decode {

/// Where a lane's two rows go, and what their outputs are multiplied by. Where nothing is visible
/// outputs are zeros and lse -inf. The head's sink joins the denominator here and only here.
class RowTargets {
 public:
  __device__ __forceinline__ RowTargets(const KernelParams& k, const JobRows& rows,
                                        const float2& max, const float2& sum)
      : op_(k.op) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int32_t row = threadIdx.x % 32 / 4 + 8 * r;
      exists_[r] = row < rows.num_rows;
      const std::int32_t head = rows.head(row);
      const std::int64_t out_row = std::int64_t{rows.query_begin} + rows.token(row);
      const float total = r == 0 ? sum.x : sum.y, top = r == 0 ? max.x : max.y;
      float denominator = total;
      if (op_.sinks != nullptr && exists_[r]) {
        denominator += exp2_approx(__ldg(op_.sinks + head) * kLog2e - top);
      }
      factor_[r] = total == 0.f ? 0.f : 1.f / denominator;
      at_[r] = out_row * op_.out_row_stride + head * op_.out_head_stride;
      if (op_.lse != nullptr && exists_[r] && threadIdx.x % 4 == 0 && threadIdx.x < 32) {
        op_.lse[head * op_.lse_head_stride + out_row * op_.lse_row_stride] =
            total == 0.f ? -INFINITY : (top + log2f(total)) * kLn2;
      }
    }
  }

  /// Channels 8 j + 2 c and the next of four blocks from `j` on, as MergedRows has them. Run by
  /// whole warps.
  template <typename T>
  __device__ __forceinline__ void store(int j, const float4 (&value)[4]) const {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = (r == 0 ? value[i].x : value[i].y) * factor_[r];
        const float b = (r == 0 ? value[i].z : value[i].w) * factor_[r];
        words[i] = pack<T>(a, b);
        const int channel = 8 * (j + i);
        if (op_.out_type == ElementType::f32 && exists_[r] && channel < op_.v_dim) {
          *reinterpret_cast<float2*>(static_cast<float*>(op_.out) + at_[r] + channel + 2 * c) =
              float2{a, b};
        }
      }
      if (op_.out_type == ElementType::f32) continue;
      transpose_in_quad(words);
      // Now 8 neighbouring channels of a block of its own are in each lane.
      if (!exists_[r] || 8 * (j + c) >= op_.v_dim) continue;
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(op_.out) + at_[r] + 8 * (j + c)) =
          uint4{words[0], words[1], words[2], words[3]};
    }
  }

 private:
  const DecodeParams& op_;
  bool exists_[2];
  float factor_[2];
  std::int64_t at_[2];
};

/// Merges the warps' results: their maxima and sums, and their outputs into two, in s.merge.
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
  // Two warps take the others' outputs, and leave theirs where they have read.
  auto& place = s.merge[warp % 2];
  if (warp >= 2) {
#pragma unroll
    for (int j = 0; j < W::kDim / 8; ++j) {
      const float* o = attention.out + 4 * j;
      place[j][lane] = float4{o[0], o[1], o[2], o[3]};
    }
  }
  __syncthreads();
  if (warp < 2) {
#pragma unroll
    for (int j = 0; j < W::kDim / 8; ++j) {
      const float4 other = place[j][lane];
      const float* o = attention.out + 4 * j;
      place[j][lane] =
          float4{o[0] + other.x, o[1] + other.y, o[2] + other.z, o[3] + other.w};
    }
  }
  __syncthreads();
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
#pragma unroll 1
  for (int first = threadIdx.x / 32 * 4; first < W::kDim / 8; first += kWarps * 4) {
    const auto merged = split_kv::merge_rows<4, 4, 32, split_kv::LanesOfRows<4, 1>>(
        pieces.count, 4,
        [&](int n, float2& max, float2& sum) {
          const float* at = k.partial_stats + pieces.slot(n) * (2 * kRows) + lane / 4;
          max = float2{__ldcg(at), __ldcg(at + 8)};
          sum = float2{__ldcg(at + kRows), __ldcg(at + kRows + 8)};
        },
        [&](int n) {
          const int block = pieces.slot(n) * (W::kDim / 8) + first;
          return k.partial_out + block * 32 + lane;
        });
    RowTargets(k, rows, merged.max, merged.sum).store<typename W::T>(first, merged.value);
  }
}

/// Run by all threads when the block has done its share of a job.
template <typename W>
__device__ __forceinline__ void finish(const KernelParams& k, const JobShare& share,
                                       const split_kv::RangeWalk& walk, const JobRows& rows,
                                       SharedMemory<W>& s, Attention<W>& attention) {
  float2 max, sum;
  merge_warps<W>(s, attention, max, sum);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto value_of = [&](int j) {
    const float4 a = s.merge[0][j][lane], b = s.merge[1][j][lane];
    return float4{a.x + b.x, a.z + b.z, a.y + b.y, a.w + b.w};
  };
  if (share.whole) {
    const RowTargets targets(k, rows, max, sum);
#pragma unroll
    for (int j = warp * 4; j < W::kDim / 8; j += kWarps * 4) {
      const float4 value[4] = {value_of(j), value_of(j + 1), value_of(j + 2), value_of(j + 3)};
      targets.store<typename W::T>(j, value);
    }
  } else {
    for (int j = warp; j < W::kDim / 8; j += kWarps) {
      __stcg(k.partial_out + (share.slot * (W::kDim / 8) + j) * 32 + lane, value_of(j));
    }
    if (warp == 0 && lane % 4 == 0) {
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
