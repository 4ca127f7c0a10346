// mbarriers, named barriers, counters in memory and proxy fences, as thin wrappers of their PTX.
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// One arrival that also announces `bytes` to come through the copy engine.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Returns once the phase of that parity has completed. A fresh barrier has completed parity 1.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Meets `threads` threads of the block at hardware barrier `id` (0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// As named_barrier; whether `value` holds in any of the threads.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool value) {
  std::uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.red.or.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(value ? 1u : 0u), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

/// Orders this thread's ordinary shared-memory accesses before later ones of the tensor cores and
/// the copy engine (through a barrier, also before other threads').
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Adds 1 and returns what was there before. Orders all that the block did before its last barrier
/// before all that other blocks do after their own call and a barrier.
__device__ __forceinline__ std::uint32_t count_arrival(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

/// Adds `step` and returns what was there before. Orders nothing.
__device__ __forceinline__ std::uint64_t count_relaxed(std::uint64_t* counter,
                                                       std::uint64_t step) {
  std::uint64_t before;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(counter), "l"(step)
               : "memory");
  return before;
}

/// As count_arrival, with `step` in place of 1.
__device__ __forceinline__ std::uint64_t count_and_order(std::uint64_t* counter,
                                                         std::uint64_t step) {
  std::uint64_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(counter), "l"(step)
               : "memory");
  return before;
}

__device__ __forceinline__ std::uint64_t read_count_relaxed(const std::uint64_t* counter) {
  std::uint64_t count;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(counter) : "memory");
  return count;
}

/// Orders what count_and_order's callers did before those counts before what this block does after
/// a barrier.
__device__ __forceinline__ std::uint64_t read_count_ordered(const std::uint64_t* counter) {
  std::uint64_t count;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(counter) : "memory");
  return count;
}

/// Waits until the kernels that this launch depends on have ended and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Lets the next kernel's blocks take multiprocessors as they become free.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace fovea::cuda::ptx
