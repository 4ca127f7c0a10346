#include "backends/cuda/peaks.h"

#include <algorithm>
#include <cstdint>

#include "backends/cuda/launch.h"
#include "fovea/tensor.h"

namespace fovea::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 132 * 8 * 4;  ///< Enough for any chip; the last wave is a small part.

constexpr int kChains = 16;  ///< Of multiply-adds: their latency is 4 clocks, on 4 units of 32.
constexpr int kRounds = 512;
constexpr double kFlops = 2.0 * kBlocks * kThreads * kChains * kRounds;

__global__ void multiply_add(float* sink) {
  float sums[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) sums[i] = static_cast<float>(threadIdx.x + i);
  const float factor = 1.0f - 1e-6f * static_cast<float>(blockIdx.x % 2);
#pragma unroll 4
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) sums[i] = fmaf(sums[i], factor, 0.5f);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += sums[i];
  if (sum < 0) *sink = sum;  // Never: but the compiler cannot know.
}

constexpr std::int64_t kBytes = std::int64_t{2} << 30;  ///< Far beyond an L2.
constexpr int kLoads = 8;                               ///< Of 16 bytes, in flight per thread.

/// Threads of a block read neighbouring pieces; a block takes every kBlocks-th span of them.
__global__ void read(const uint4* memory, float* sink) {
  constexpr std::int64_t kSpan = kThreads * kLoads;
  std::uint32_t seen = 0;
  for (std::int64_t at = blockIdx.x * kSpan; at < kBytes / 16; at += kBlocks * kSpan) {
    uint4 pieces[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) pieces[i] = __ldcs(memory + at + i * kThreads + threadIdx.x);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      seen |= pieces[i].x | pieces[i].y | pieces[i].z | pieces[i].w;
    }
  }
  if (seen == 1) *sink = 1;  // Never: the memory is zero.
}
static_assert(kBytes % (16 * kThreads * kLoads) == 0);

/// Seconds between two events around `queue`, the least of a few.
template <typename Queue>
double best_of(const OpContext& ctx, const Queue& queue) {
  constexpr int kRuns = 5;
  const CurrentDevice current(ctx.memory.device);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  float best = 1e30f;
  for (int i = 0; i < kRuns; ++i) {
    check(cudaEventRecord(begin, stream_of(ctx)), "cudaEventRecord");
    queue();
    check(cudaEventRecord(end, stream_of(ctx)), "cudaEventRecord");
    check(cudaEventSynchronize(end), "measure_peaks");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    best = std::min(best, milliseconds);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best * 1e-3;
}

}  // namespace

double best_seconds(const OpContext& ctx, void (*queue)(void* stream, float* sink)) {
  const Tensor sink = Tensor::empty(DType::f32, {1}, ctx.memory);
  return best_of(ctx, [&] { queue(ctx.stream, sink.ptr<float>()); });
}

MachinePeaks measure_peaks(const OpContext& ctx) {
  const double fma_seconds = best_seconds(ctx, [](void* stream, float* sink) {
    multiply_add<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(sink);
    check(cudaGetLastError(), "multiply_add");
  });
  const Tensor memory = Tensor::empty(DType::u8, {kBytes}, ctx.memory);
  const Tensor sink = Tensor::empty(DType::f32, {1}, ctx.memory);
  const CurrentDevice current(ctx.memory.device);
  check(cudaMemsetAsync(memory.view().data, 0, kBytes, stream_of(ctx)), "cudaMemsetAsync");
  const double read_seconds = best_of(ctx, [&] {
    read<<<kBlocks, kThreads, 0, stream_of(ctx)>>>(static_cast<const uint4*>(memory.view().data),
                                                   sink.ptr<float>());
    check(cudaGetLastError(), "read");
  });
  return {.f32_fma_gflops = kFlops / fma_seconds * 1e-9,
          .bf16_dot_gflops = 0,
          .read_gbps = static_cast<double>(kBytes) / read_seconds * 1e-9};
}

}  // namespace fovea::cuda
