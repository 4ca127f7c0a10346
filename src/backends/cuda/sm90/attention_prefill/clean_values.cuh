// Values that must not spoil a product: 0 * NaN is NaN, and masked weights are zeros.
#pragma once

#include "backends/cuda/sm90/attention_prefill/block.cuh"
#include "backends/cuda/sm90/finite.cuh"
#include "backends/cuda/sm90/row_softmax.cuh"

namespace fovea::cuda::prefill {

/// Of a thread: its two rows' channels 8 j + 2 c and the next, as scores lie.
template <typename W>
using OutputFragment = float[W::kParts][W::kColumns / 2];

/// Calls change(piece, key) for the share of thread `thread` of `threads` of a value tile's 16-byte
/// pieces.
template <typename W, typename Change>
__device__ __forceinline__ void for_each_piece(std::uint8_t (&v)[W::kVChunks][W::kKeys * 128],
                                               int thread, int threads, Change change) {
  auto* pieces = reinterpret_cast<uint4*>(v);
#pragma unroll 4
  for (int i = thread; i < W::kVChunks * W::kKeys * 8; i += threads) {
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

/// Run by the inspecting warps: makes value tiles fit for O += P V before the computing warps see
/// them. Of tiles that not every row sees in full, keys that no row sees become zeros; whether
/// other values are not finite is told.
template <typename W>
__device__ void inspect_items(SharedMemory<W>& s) {
  using T = typename W::T;
  const int thread = threadIdx.x - (kThreads - kInspectThreads);
  std::uint32_t count = 0;
  for (std::uint32_t turn = 0;; ++turn) {
    const RingPosition<W::kQueryStages> at(turn);
    ptx::mbarrier_wait(ptx::shared_address(&s.q_full[at.stage]), at.parity);
    const Item item = s.item(at.stage);
    if (item.head < 0) break;
    ptx::mbarrier_arrive(ptx::shared_address(&s.q_empty[at.stage]));
    const KeyWalk<W::kKeys> walk(item.any, item.tile.num_paged);
    for (std::int32_t i = 0; i < walk.count(); ++i, ++count) {
      const KeyPosition to(count);
      ptx::mbarrier_wait(ptx::shared_address(&s.v_full[to.stage]), to.parity);
      if (!walk.is_inside(i, item.common)) {
        const std::int32_t begin = item.any.begin - walk.first_key(i);
        const std::int32_t end = min(item.any.end, walk.limit(i)) - walk.first_key(i);
        bool bad = false;
        for_each_piece<W>(s.v[to.stage], thread, kInspectThreads, [&](uint4& piece, int key) {
          if (key < begin || key >= end) {
            piece = uint4{0, 0, 0, 0};
          } else {
            bad |= any_not_finite<T>(piece);
          }
        });
        if (bad) s.not_finite[to.stage] = true;
        ptx::fence_async_proxy();
      }
      ptx::mbarrier_arrive(ptx::shared_address(&s.v_ready[to.stage]));
    }
  }
}

/// Run by all computing threads between products: what is not finite among the values of a tile's
/// keys [begin, end) goes into the outputs of rows that see it, and out of the tile.
template <typename W>
__device__ __forceinline__ void repair_values(SharedMemory<W>& s, int stage, std::int32_t begin,
                                              std::int32_t end, const RowKeys& rows,
                                              OutputFragment<W>& out) {
  add_not_finite<W>(s.v[stage], max(begin, 0), min(end, W::kKeys), rows, out);
  ptx::named_barrier(kComputeBarrier, kComputeThreads);  // All have read what goes away now.
  for_each_piece<W>(s.v[stage], threadIdx.x, kComputeThreads,
                    [](uint4& piece, int) { piece = only_finite<typename W::T>(piece); });
  if (threadIdx.x == 0) s.not_finite[stage] = false;
  ptx::fence_async_proxy();
  ptx::named_barrier(kComputeBarrier, kComputeThreads);
}

}  // namespace fovea::cuda::prefill
