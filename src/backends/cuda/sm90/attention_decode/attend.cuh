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
    const KeyInterval any = visible_to_any(k.op.variant, rows.tokens(), rows.extent);
    const KeyInterval common = visible_to_all(k.op.variant, rows.tokens(), rows.extent);
    any_begin = static_cast<std::int32_t>(any.begin);
    any_end = static_cast<std::int32_t>(any.end);
    common_begin = static_cast<std::int32_t>(common.begin);
    common_end = static_cast<std::int32_t>(common.end);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const KeyInterval seen = rows.visible(lane / 4 + 8 * r);
      begin[r] = static_cast<std::int32_t>(seen.begin);
      end[r] = static_cast<std::int32_t>(seen.end);
    }
  }

  /// Takes in the slice of keys from `first` on.
  __device__ __forceinline__ void add(std::uint32_t query, Slice<W>& slice, std::int32_t first) {
    float score[8] = {};
    const std::uint32_t keys = ptx::shared_address(slice.k);
    const int key = lane / 16 * 8 + lane % 8;
    const int row = lane / 8 % 2 * 8 + lane % 8;  // Of queries and of values.
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t a[4], b[4];
      ptx::load_matrices(
          a, query + row * W::kDim * 2 + piece_offset(row, step * 2 + lane / 16));
      ptx::load_matrices(
          b, keys + key * W::kDim * 2 + piece_offset(key, step * 2 + lane / 8 % 2));
      ptx::mma<T>(score, a, b[0], b[1]);
      ptx::mma<T>(score + 4, a, b[2], b[3]);
    }
    float scale = k.op.sm_scale * kLog2e;
    if (k.op.variant.soft_cap > 0.f) {
      cap_scores<kKeys>(score, k.op.sm_scale, k.op.variant.soft_cap);
      scale = 1.f;
    }
    if (first < common_begin || first + kKeys > common_end) {
      mask<kKeys>(score, {{begin[0] - first, begin[1] - first}, {end[0] - first, end[1] - first}});
    }
    const float2 factor = softmax.weigh<kKeys>(score, scale);
    if (__any_sync(~0u, factor.x != 1.f || factor.y != 1.f)) {
#pragma unroll
      for (int i = 0; i < W::kDim / 2; ++i) out[i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
    }
    clean_values(slice, first);
    std::uint32_t weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = pack<T>(score[2 * i], score[2 * i + 1]);
    const std::uint32_t values = ptx::shared_address(slice.v);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t b[4];
      ptx::load_matrices_transposed(
          b, values + row * W::kDim * 2 + piece_offset(row, step * 2 + lane / 16));
      ptx::mma<T>(out + 8 * step, weight, b[0], b[1]);
      ptx::mma<T>(out + 8 * step + 4, weight, b[2], b[3]);
    }
  }

  /// Zeros, before a product, values that some row does not see and that would spoil it: of keys
  /// that no row of the job sees all, of others what is not finite, once it is in the outputs of
  /// rows that see it. Keys that were not copied are zeros.
  __device__ __forceinline__ void clean_values(Slice<W>& slice, std::int32_t first) {
    const bool hidden_before = max(first, loaded_begin) < common_begin;
    const bool hidden_behind = min(first + kKeys, loaded_end) > common_end;
    if (!hidden_before && !hidden_behind) return;
    bool bad = false;
    auto* pieces = reinterpret_cast<uint4*>(slice.v);
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
              &slice.v[i][piece_offset(i, j) + lane % 4 * 4]);
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
