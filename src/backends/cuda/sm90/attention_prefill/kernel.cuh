// Attention prefill for compute capability 9.0. README.md beside this draws the schedule.
#pragma once

#include "backends/cuda/sm90/attention_prefill/attend.cuh"
#include "backends/cuda/sm90/attention_prefill/load.cuh"

namespace fovea::cuda::prefill {

template <typename W>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillParams op,
                   const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<SharedMemory<W>*>(shared_bytes);
  if (threadIdx.x == 0) s.init();
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < kComputeThreads / 32) {
    ptx::take_registers<224>();
    attend_items<W>(op, s);
  } else {
    ptx::give_registers<56>();
    if (warp == kComputeThreads / 32) {
      load_items<W>(op, maps, s);
    } else {
      inspect_items<W>(s);
    }
  }
}

}  // namespace fovea::cuda::prefill
