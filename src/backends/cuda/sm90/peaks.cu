#include "backends/cuda/peaks.h"

#include "backends/cuda/launch.h"
#include "backends/cuda/sm90/ptx/barrier.cuh"
#include "backends/cuda/sm90/ptx/wgmma_rows.cuh"

namespace fovea::cuda::sm90 {
namespace {

// Two warpgroups, so that one queues products while the other's run; blocks in several waves, so
// that the number of multiprocessors does not matter.
constexpr int kWarpgroups = 2, kThreads = 128 * kWarpgroups;
constexpr int kBlocks = 132 * 8;
constexpr int kRounds = 256;
constexpr int kRows = 64, kColumns = 128, kDepth = 64;  ///< Of a round of a warpgroup.
constexpr double kFlops = 2.0 * kBlocks * kWarpgroups * kRounds * kRows * kColumns * kDepth;

/// [64, 64] times [64, 128], both of small values in rows of 128 bytes.
__global__ void __launch_bounds__(kThreads, 1) multiply(float* sink) {
  __shared__ alignas(1024) __nv_bfloat16 a[kRows * kDepth];
  __shared__ alignas(1024) __nv_bfloat16 b[kColumns * kDepth];
  // Distinct values: a chip that toggles few bits draws less power, and clocks higher.
  for (int i = threadIdx.x; i < kColumns * kDepth; i += kThreads) {
    const float value = static_cast<float>((i * 7919) % 2003 - 1001) * 1e-3f;
    if (i < kRows * kDepth) a[i] = __float2bfloat16(value);
    b[i] = __float2bfloat16(-value);
  }
  ptx::fence_async_proxy();
  __syncthreads();
  const std::uint64_t a_operand = ptx::swizzled_operand(ptx::shared_address(a));
  const std::uint64_t b_operand = ptx::swizzled_operand(ptx::shared_address(b));
  float sums[kColumns / 2] = {};
  for (int round = 0; round < kRounds; ++round) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {  // 32 bytes each.
      ptx::wgmma_scores<__nv_bfloat16, kColumns>(sums, a_operand + 2 * step, b_operand + 2 * step,
                                                 true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
  }
  ptx::wgmma_wait<0>();
  ptx::pin(sums);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum += sums[i];
  if (sum == 0.125f) *sink = sum;
}

}  // namespace

MachinePeaks measure_peaks(const OpContext& ctx) {
  MachinePeaks peaks = cuda::measure_peaks(ctx);
  const double seconds = best_seconds(ctx, [](void* stream, float* sink) {
    multiply<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(sink);
    check(cudaGetLastError(), "multiply");
  });
  peaks.bf16_dot_gflops = kFlops / seconds * 1e-9;
  return peaks;
}

}  // namespace fovea::cuda::sm90
