// MLA decode over tiles of 64 query rows. README.md beside this draws the schedule.
//
// Query rows stand on the M side of every product:
//   S [64, 64 keys]   = Q [64, 576] K^T        each warpgroup of one tile of a pair
//   O [64, 256]      += P [64, 64] V [64, 256]  each warpgroup of both tiles, 256 channels of 512
// so that P needs no transposition and is read from registers in half of the output products.
#pragma once

#include "backends/cuda/sm90/mla_decode/wide_attend.cuh"
#include "backends/cuda/sm90/mla_decode/wide_block.cuh"

namespace fovea::cuda::mla {

template <typename T>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_decode_kernel(const __grid_constant__ KernelParams k,
                       const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<WideMemory*>(shared_bytes);

  // Until each role waits for it, the kernel before may still run. The schedule and what it was
  // made from are older than that kernel; all else is touched after the wait.
  JobWalk walk(k, kWideRows);
  Job job;
  if (threadIdx.x == 0) ptx::prefetch_tensor_map(&map);
  s.init();
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  std::uint32_t turn[2] = {0, 0};
  if (warp < kOutputThreads / 32) {
    ptx::take_registers<232>();
    WideOutput out;
    while (walk.next(job)) {
      ptx::named_barrier(kOutputBarrier, kOutputThreads);  // The job before is not read any more.
      if (threadIdx.x == 0) s.handover.begin(job, walk);
      ptx::wait_for_previous_kernel();
      if (threadIdx.x == 0) announce(k, s.handover);
      load_query_rows<T, kWideRows, kOutputThreads / 32>(k, job,
                                                         [&](int chunk) { return s.q[chunk]; });
      if (threadIdx.x < kWideRows) s.seen[threadIdx.x] = seen_keys(k, job, threadIdx.x);
      ptx::wait_for_pieces();
      ptx::fence_async_proxy();
      ptx::named_barrier(kOutputBarrier, kOutputThreads);
      if (warp < kOutputThreads / 64) {
        WideAttention<T, kLeft>(k, s.handover.job, s, turn).run(out);
      } else {
        WideAttention<T, kRight>(k, s.handover.job, s, turn).run(out);
      }
      finish<kWideRows, WideOrder>(k, s.handover, out);
    }
  } else {
    ptx::give_registers<40>();
    const int loader = warp - kOutputThreads / 32;
    if (loader == 1) {
      ptx::wait_for_previous_kernel();
      ptx::let_next_kernel_start();
      clear_unused_rows(k.op, blockIdx.x, gridDim.x);
    }
    // Blocks of a group read the same rows at nearly the same time: they may leave L2 first.
    const std::uint64_t policy = ptx::make_l2_policy(ptx::L2Policy::evict_first);
    while (walk.next(job)) {
      if (loader == 0) load_pairs(k, &map, job, walk.request(), s, turn, policy);
    }
  }
}

}  // namespace fovea::cuda::mla
