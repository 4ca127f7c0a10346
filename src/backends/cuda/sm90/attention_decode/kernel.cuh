// Grouped-query decode for compute capability 9.0. README.md beside this draws the schedule.
#pragma once

#include "backends/cuda/sm90/attention_decode/finish.cuh"
#include "backends/cuda/sm90/attention_decode/load.cuh"

namespace fovea::cuda::decode {

template <typename W>
__global__ void __launch_bounds__(kThreads, W::kBlocksPerMultiprocessor)
    decode_kernel(const __grid_constant__ KernelParams k) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<SharedMemory<W>*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto& ring = s.ring[warp];
  if (!W::Heads::kQuantized && (k.op.qk_dim < W::kDim || k.op.v_dim < W::kDim)) {
    auto* words = reinterpret_cast<uint4*>(ring);
    constexpr int kWords = sizeof ring / sizeof(uint4);
    for (int i = lane; i < kWords; i += 32) words[i] = uint4{0, 0, 0, 0};
    __syncwarp();
  }
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();

  Loader<W> loader(k, ring);
  for (int i = 0; i < W::kStages - 1; ++i) loader.issue(i);
  split_kv::RangeWalk walk(k.shape, k.ranges, k.group(), k.op.query_start_loc, k.op.seq_lens);
  JobShare share;
  int stage = 0;
  while (walk.next(share)) {
    load_query<W>(k, share, s);
    const std::uint32_t query = ptx::shared_address(s.q);
    Attention<W> attention(k, share, s);
    for (std::int32_t t = 0; t < share.tiles; ++t) {
      ptx::wait_for_groups<W::kStages - 2>();
      __syncwarp();  // The slice is here, and the one before it is not read any more.
      loader.issue(stage == 0 ? W::kStages - 1 : stage - 1);
      const std::int32_t first = (share.first_tile + t) * kKeyTile + warp * kKeys;
      const VisibleKeys& visible = attention.visible;
      if (first < visible.any_end && first + kKeys > visible.any_begin) {
        attention.add(query, ring[stage], first);
      }
      stage = stage == W::kStages - 1 ? 0 : stage + 1;
    }
    finish<W>(k, walk, s, attention);
  }
}

}  // namespace fovea::cuda::decode
