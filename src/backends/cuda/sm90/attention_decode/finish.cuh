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

  /// Tiles j to j + 3 of 8 channels, as MergedRows has them. Run by whole warps.
  template <typename W>
  __device__ __forceinline__ void store(int j, const float4 (&value)[4]) const {
    constexpr int kTiles = W::Heads::kInterleave;
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Of tile i the lane has columns 2 c and the next: of kTiles tiles together 2 kTiles channels
      // in a row, of which word i is a pair.
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float pair[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int place = 2 * (i % kTiles) + n;
          const float4& of_tile = value[i / kTiles * kTiles + place % kTiles];
          pair[n] = (place < kTiles ? (r == 0 ? of_tile.x : of_tile.y)
                                    : (r == 0 ? of_tile.z : of_tile.w)) *
                    factor_[r];
        }
        words[i] = pack<typename W::T>(pair[0], pair[1]);
        const int channel = 8 * j + (i / kTiles * 8 + 2 * c) * kTiles + 2 * (i % kTiles);
        if (op_.out_type == ElementType::f32 && exists_[r] && channel < op_.v_dim) {
          *reinterpret_cast<float2*>(static_cast<float*>(op_.out) + at_[r] + channel) =
              float2{pair[0], pair[1]};
        }
      }
      if (op_.out_type == ElementType::f32) continue;
      // Now 8 neighbouring channels of a tile of its own are in each lane.
      if constexpr (kTiles == 1) transpose_in_quad(words);
      auto* const out = static_cast<std::uint16_t*>(op_.out) + at_[r] + 8 * j;
      if (!exists_[r] || 8 * (j + c) >= op_.v_dim) continue;
      if constexpr (kTiles == 2) {
        *reinterpret_cast<uint2*>(out + 4 * c) = uint2{words[0], words[1]};
        *reinterpret_cast<uint2*>(out + 16 + 4 * c) = uint2{words[2], words[3]};
      } else {
        *reinterpret_cast<uint4*>(out + 8 * c) = uint4{words[0], words[1], words[2], words[3]};
      }
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
  std::uint32_t* counter = k.counters + k.place(pieces.first_slot);
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
          const float* at = k.partial_stats + k.place(pieces.slot(n)) * (2 * kRows) + lane / 4;
          max = float2{__ldcg(at), __ldcg(at + 8)};
          sum = float2{__ldcg(at + kRows), __ldcg(at + kRows + 8)};
        },
        [&](int n) {
          return k.partial_out + (k.place(pieces.slot(n)) * (W::kDim / 8) + first) * 32 + lane;
        });
    RowTargets(k, rows, merged.max, merged.sum).store<W>(first, merged.value);
  }
}

/// Run by all threads when the block has done its share of a job.
template <typename W>
__device__ __forceinline__ void finish(const KernelParams& k, const split_kv::RangeWalk& walk,
                                       SharedMemory<W>& s, Attention<W>& attention) {
  float2 max, sum;
  merge_warps<W>(s, attention, max, sum);
  const JobShare share = s.share;
  const JobRows rows(k, share);
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
      targets.store<W>(j, value);
    }
  } else {
    for (int j = warp; j < W::kDim / 8; j += kWarps) {
      __stcg(k.partial_out + (k.place(share.slot) * (W::kDim / 8) + j) * 32 + lane, value_of(j));
    }
    if (warp == 0 && lane % 4 == 0) {
      float* at = k.partial_stats + k.place(share.slot) * (2 * kRows) + lane / 4;
      __stcg(at, max.x);
      __stcg(at + 8, max.y);
      __stcg(at + kRows, sum.x);
      __stcg(at + kRows + 8, sum.y);
    }
  }
  if (share.whole) return;
  merge_blocks<W>(k, rows, walk.pieces(share.slot, share.first_unit, share.num_units), s);
}

}  // namespace fovea::cuda::decode
