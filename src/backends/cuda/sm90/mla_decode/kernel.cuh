// MLA decode over tiles of 16 or 32 query rows. README.md beside this draws the schedule.
//
// Keys stand on the M side of every product, query rows (tokens x heads) on the N side:
//   S^T [64 keys, rows]  = K [64, 576] Q^T [576, rows]     one warpgroup
//   O^T [512, rows]     += V^T [512, 64] P^T [64, rows]    two warpgroups, 256 channels each
// so that 16 rows cost half of 32. V is K's first 512 channels: one tile in shared memory,
// read along its rows for S and across them for O.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"
#include "backends/cuda/sm90/mla_decode/load.cuh"
#include "backends/cuda/sm90/mla_decode/finish.cuh"
#include "backends/cuda/sm90/mla_decode/scores.cuh"

namespace fovea::cuda::mla {

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_kernel(const __grid_constant__ KernelParams k,
                      const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<SharedMemory<kRows>*>(shared_bytes);
  constexpr int kSlots = SharedMemory<kRows>::kSlots;

  // Until each role waits for it, the kernel before may still run. The schedule and what it was
  // made from are older than that kernel; all else is touched after the wait.
  JobWalk walk(k, kRows);
  Job job;
  if (threadIdx.x == 0) ptx::prefetch_tensor_map(&map);
  s.init();
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  RingPosition<kSlots> ring;
  std::uint32_t message = 0;
  if (warp < 4 * kOutputWarpgroups) {
    ptx::take_registers<176>();
    OutputFragment<kRows> out;
    while (walk.next(job)) {
      ptx::named_barrier(kOutputBarrier, kOutputThreads);  // The job before is not read any more.
      if (threadIdx.x == 0) s.handover.begin(job, walk);
      ptx::named_barrier(kOutputBarrier, kOutputThreads);
      ptx::wait_for_previous_kernel();
      if (threadIdx.x == 0) announce(k, s.handover);
      accumulate_tiles<T, kRows>(job.tile_end - job.tile_begin, s, ring, message, out);
      finish<kRows, DenseOrder>(k, s.handover, out);
      s.handover.release();
    }
  } else if (warp < 4 * kOutputWarpgroups + 4) {
    ptx::give_registers<120>();
    while (walk.next(job)) {
      ptx::wait_for_previous_kernel();
      load_query<T, kRows>(k, job, s);
      ptx::fence_async_proxy();
      ptx::named_barrier(kScoreBarrier, 128);
      score_tiles<T, kRows>(k, job, s, ring, message);
    }
  } else {
    ptx::give_registers<40>();
    const int loader = warp - (4 * kOutputWarpgroups + 4);
    if (loader == 1) {
      ptx::wait_for_previous_kernel();
      ptx::let_next_kernel_start();
      clear_unused_rows(k.op, blockIdx.x, gridDim.x);
    }
    // Blocks of a group read the same rows at nearly the same time: they may leave L2 first.
    const std::uint64_t policy = ptx::make_l2_policy(ptx::L2Policy::evict_first);
    while (walk.next(job)) {
      if (loader == 0) load_tiles<kRows>(k, &map, job, walk.request(), s, ring, policy);
    }
  }
}

}  // namespace fovea::cuda::mla
