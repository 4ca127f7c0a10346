// Values that must not spoil a product: 0 * NaN is NaN, and masked weights are zeros.
#pragma once

#include "backends/cuda/sm90/attention_prefill/block.cuh"
#include "backends/cuda/sm90/finite.cuh"
#include "backends/cuda/sm90/row_softmax.cuh"

namespace fovea::cuda::prefill {

/// Of a thread: its two rows' channels 8 j + 2 c and the next, as scores lie.
template <typename W>
using OutputFragment = float[W::kParts][W::kColumns / 2];

/// Calls change(piece, key) for this thread's share of a value tile's 16-byte pieces.
template <typename W, typename Change>
__device__ __forceinline__ void for_each_piece(std::uint8_t (&v)[W::kVChunks][W::kKeys * 128],
                                               Change change) {
  auto* pieces = reinterpret_cast<uint4*>(v);
#pragma unroll 4
  for (int i = threadIdx.x; i < W::kVChunks * W::kKeys * 8; i += kComputeThreads) {
    change(pieces[i], i / 8 % W::kKeys);
  }
}

/// Adds what is not finite among the values of keys [begin, end) to the outputs of rows that see
/// it, whatever its weight: 0 < p.
template <typename W>
__device__ __forceinline__ void add_not_finite(const std::uint8_t (&v)[W::kVChunks][W::kKeys * 128],
                                            std::int32_t begin, std::int32_t end,
                                            const RowKeys& rows, OutputFragment<W>& out) {
  using T = typename W::T;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (std::int32_t key = begin; key < end; ++key) {
    const bool sees[2] = {key >= rows.begin[0] && key < rows.end[0],
                          key >= rows.begin[1] && key < rows.end[1]};
#pragma unroll
    for (int part = 0; part < W::kParts; ++part) {
#pragma unroll
      for (int j = 0; j < W::kColumns / 8; ++j) {
        const int chunk = (part * W::kColumns + 8 * j) / 64;
        const int piece = j % 8 ^ key % 8;
        const auto word = *reinterpret_cast<const std::uint32_t*>(
            &v[chunk][key * 128 + piece * 16 + lane % 4 * 4]);
        cuda::add_not_finite<T>(word, sees[0], sees[1], &out[part][4 * j]);
      }
    }
  }
}

/// Makes a value tile fit for O += P V: keys outside [begin, end), which no row sees, become zeros;
/// so do values inside that are not finite, once rows that see them have them in their outputs. Run
/// by all computing threads, between products.
template <typename W>
__device__ __forceinline__ void clean_values(std::uint8_t (&v)[W::kVChunks][W::kKeys * 128],
                                             std::int32_t begin, std::int32_t end,
                                             const RowKeys& rows, OutputFragment<W>& out) {
  using T = typename W::T;
  begin = max(begin, 0);
  end = min(end, W::kKeys);
  bool bad = false;
  for_each_piece<W>(v, [&](uint4& piece, int key) {
    if (key < begin || key >= end) {
      piece = uint4{0, 0, 0, 0};
    } else {
      bad |= any_not_finite<T>(piece);
    }
  });
  ptx::fence_async_proxy();
  if (!ptx::named_barrier_any(kComputeBarrier, kComputeThreads, bad)) return;

  add_not_finite<W>(v, begin, end, rows, out);
  ptx::named_barrier(kComputeBarrier, kComputeThreads);  // All have read what goes away now.
  for_each_piece<W>(v, [](uint4& piece, int) { piece = only_finite<T>(piece); });
  ptx::fence_async_proxy();
  ptx::named_barrier(kComputeBarrier, kComputeThreads);
}

}  // namespace fovea::cuda::prefill
