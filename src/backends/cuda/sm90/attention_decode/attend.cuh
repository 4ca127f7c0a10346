// Attention of a warp over its slices: S = Q K^T, softmax, O += P V, 16 rows.
#pragma once

#include "backends/cuda/sm90/attention_decode/block.cuh"
#include "backends/cuda/sm90/finite.cuh"
#include "backends/cuda/sm90/ptx/mma.cuh"
#include "backends/cuda/sm90/row_softmax.cuh"

namespace fovea::cuda::decode {

/// Of a lane: its two rows' channels 8 j + 2 c and the next, as scores lie.
template <typename W>
using OutputFragment = float[W::kDim / 2];

/// Queries of a job to shared memory. Rows that do not exist, and channels past the last, are
/// zeros. Run by all threads.
template <typename W>
__device__ __forceinline__ void load_query(const KernelParams& k, const JobRows& rows,
                                           SharedMemory<W>& s) {
  __syncthreads();  // What merged the job before may still be read.
  for (int i = threadIdx.x; i < kRows * W::kPieces; i += kThreads) {
    const int row = i / W::kPieces, piece = i % W::kPieces;
    uint4 value{0, 0, 0, 0};
    if (row < rows.num_rows && piece * 8 < k.op.qk_dim) {
      const std::int64_t at =
          (std::int64_t{rows.query_begin} + rows.token(row)) * k.op.q_row_stride +
          rows.head(row) * k.op.q_head_stride + piece * 8;
      value = __ldg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(k.op.q) + at));
    }
    *reinterpret_cast<uint4*>(&s.q[row][piece_offset(row, piece)]) = value;
  }
  __syncthreads();
}

template <typename W>
struct Attention {
  using T = typename W::T;
  static constexpr int kSteps = W::kDim / 16;

  const KernelParams& k;
  const JobRows& rows;
  const std::int32_t loaded_begin, loaded_end;  ///< Keys that were copied.
  const int lane = threadIdx.x % 32;
  std::int32_t begin[2], end[2];          ///< Keys that the lane's rows see.
  std::int32_t any_begin, any_end;        ///< Some row of the job sees them.
  std::int32_t common_begin, common_end;  ///< Every row does.
  Softmax softmax;
  OutputFragment<W> out = {};

  __device__ Attention(const KernelParams& k, const JobRows& rows, const JobShare& share)
      : k(k),
        rows(rows),
        loaded_begin(k.shape.first_key(share.seq_len, share.query_len)),
        loaded_end(share.seq_len) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const KeyInterval seen = rows.visible(lane / 4 + 8 * r);
      begin[r] = static_cast<std::int32_t>(seen.begin);
      end[r] = static_cast<std::int32_t>(seen.end);
    }
    // Neither end decreases from a row to the next.
    any_begin = __shfl_sync(~0u, begin[0], 0);
    any_end = __shfl_sync(~0u, end[1], 31);
    common_begin = __shfl_sync(~0u, begin[1], 31);
    common_end = __shfl_sync(~0u, end[0], 0);
  }

  /// S = Q K^T of rows of T, channel steps [kBegin, kEnd).
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void add_scores(float (&score)[8], std::uint32_t query,
                                             std::uint32_t keys) const {
    const int key = lane / 16 * 8 + lane % 8, row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
      std::uint32_t a[4], b[4];
      ptx::load_matrices(
          a, query + row * W::kDim * 2 + piece_offset(row, step * 2 + lane / 16));
      ptx::load_matrices(
          b, keys + key * W::kDim * 2 + piece_offset(key, step * 2 + lane / 8 % 2));
      ptx::mma<T>(score, a, b[0], b[1]);
      ptx::mma<T>(score + 4, a, b[2], b[3]);
    }
  }

  /// O += P V, of channel steps likewise.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void add_outputs(const float (&score)[8], std::uint32_t values) {
    std::uint32_t weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = pack<T>(score[2 * i], score[2 * i + 1]);
    const int row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
      std::uint32_t b[4];
      ptx::load_matrices_transposed(
          b, values + row * W::kDim * 2 + piece_offset(row, step * 2 + lane / 16));
      ptx::mma<T>(out + 8 * step, weight, b[0], b[1]);
      ptx::mma<T>(out + 8 * step + 4, weight, b[2], b[3]);
    }
  }

  /// Scores of keys from `first` on become weights; earlier outputs follow.
  __device__ __forceinline__ void weigh(float (&score)[8], std::int32_t first) {
    float scale = k.op.sm_scale * kLog2e;
    if (k.op.variant.soft_cap > 0.f) {
      cap_scores<kKeys>(score, k.op.sm_scale, k.op.variant.soft_cap);
      scale = 1.f;
    }
    if (first < common_begin || first + kKeys > common_end) {
      mask<kKeys>(score, {{begin[0] - first, begin[1] - first}, {end[0] - first, end[1] - first}});
    }
    const float2 factor = softmax.weigh<kKeys>(score, scale);
    if (!__any_sync(~0u, factor.x != 1.f || factor.y != 1.f)) return;
#pragma unroll
    for (int i = 0; i < W::kDim / 2; ++i) out[i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
  }

  /// Takes in the slice of keys from `first` on. `converted` is this warp's.
  __device__ __forceinline__ void add(std::uint32_t query, Slice<W>& slice,
                                      Converted<W>& converted, std::int32_t first) {
    if constexpr (W::Heads::kQuantized) {
      add_quantized(query, slice, converted.rows, first);
    } else {
      float score[8] = {};
      add_scores<0, kSteps>(score, query, ptx::shared_address(slice.k));
      weigh(score, first);
      clean_values(slice.v, first);
      add_outputs<0, kSteps>(score, ptx::shared_address(slice.v));
    }
  }

  /// Scales multiply scores and weights, not channels: those of a head's halves apart.
  __device__ __forceinline__ void add_quantized(std::uint32_t query, Slice<W>& slice,
                                                Rows<W>& rows_of_t, std::int32_t first) {
    const std::uint32_t converted = ptx::shared_address(rows_of_t);
    convert(slice.k, rows_of_t);
    float score[8] = {}, other[8] = {};
    add_scores<0, kSteps / 2>(score, query, converted);
    add_scores<kSteps / 2, kSteps>(other, query, converted);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 scales = scales_of(slice.k, i, k.op.k_scale);
      score[i] = score[i] * scales.x + other[i] * scales.y;
    }
    weigh(score, first);
    __syncwarp();  // Keys are not read any more.
    convert(slice.v, rows_of_t);
    clean_values(rows_of_t, first);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // A key that a row does not see weighs nothing, whatever its scales are.
      const float2 scales = scales_of(slice.v, i, k.op.v_scale);
      other[i] = score[i] == 0.f ? 0.f : score[i] * scales.y;
      score[i] = score[i] == 0.f ? 0.f : score[i] * scales.x;
    }
    add_outputs<0, kSteps / 2>(score, converted);
    add_outputs<kSteps / 2, kSteps>(other, converted);
    __syncwarp();  // Nor are values.
  }

  /// Of both halves of the head that element `i` of a score fragment belongs to.
  __device__ __forceinline__ float2 scales_of(const std::uint8_t (&heads)[kKeys][W::kRowBytes],
                                              int i, float of_tensor) const {
    if constexpr (W::Heads::kScaleBytes == 0) return {of_tensor, of_tensor};
    const int key = i / 4 * 8 + lane % 4 * 2 + i % 2;
    return *reinterpret_cast<const float2*>(&heads[key][W::kCodeBytes]);
  }

  /// Codes as bf16: a lane takes half a head.
  __device__ __forceinline__ void convert(const std::uint8_t (&heads)[kKeys][W::kRowBytes],
                                          Rows<W>& to) const {
    constexpr int kOfLane = W::kPieces / 2;
    const int row = lane / 2, first = lane % 2 * kOfLane;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      *reinterpret_cast<uint4*>(&to[row][piece_offset(row, first + i)]) =
          W::Heads::convert(&heads[row][(first + i) * W::Heads::kBits]);
    }
    __syncwarp();
  }

  /// Zeros, before a product, values that some row does not see and that would spoil it: of keys
  /// that no row of the job sees all, of others what is not finite, once it is in the outputs of
  /// rows that see it. Keys that were not copied are zeros.
  __device__ __forceinline__ void clean_values(Rows<W>& values, std::int32_t first) {
    const bool hidden_before = max(first, loaded_begin) < common_begin;
    const bool hidden_behind = min(first + kKeys, loaded_end) > common_end;
    if (!hidden_before && !hidden_behind) return;
    bool bad = false;
    auto* pieces = reinterpret_cast<uint4*>(values);
    for (int i = lane; i < kKeys * W::kPieces; i += 32) {
      const std::int32_t key = first + i / W::kPieces;
      if (key < any_begin || key >= any_end) {
        pieces[i] = uint4{0, 0, 0, 0};
      } else {
        bad |= any_not_finite<T>(pieces[i]);
      }
    }
    if (__any_sync(~0u, bad)) {
#pragma unroll 1
      for (int i = 0; i < kKeys; ++i) {
        const bool sees[2] = {first + i >= begin[0] && first + i < end[0],
                              first + i >= begin[1] && first + i < end[1]};
#pragma unroll
        for (int j = 0; j < W::kDim / 8; ++j) {
          const auto word = *reinterpret_cast<const std::uint32_t*>(
              &values[i][piece_offset(i, j) + lane % 4 * 4]);
          add_not_finite<T>(word, sees[0], sees[1], out + 4 * j);
        }
      }
      __syncwarp();
      for (int i = lane; i < kKeys * W::kPieces; i += 32) pieces[i] = only_finite<T>(pieces[i]);
    }
    __syncwarp();
  }
};

}  // namespace fovea::cuda::decode
