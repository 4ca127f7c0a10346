// How kernels are timed: one CUDA graph of 20 calls over copies of the operands that together
// exceed twice the L2; time / 20; median of the replays.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "cuda/device_array.h"

namespace fovea::cuda::test {

constexpr int kCallsOfGraph = 20;

/// Copies of operands of `bytes`; beyond one a multiple of a graph's calls.
inline int copies_beyond_cache(std::size_t bytes) {
  int l2 = 0;
  check_cuda(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0), "L2 size");
  const auto copies = static_cast<int>(std::max<std::size_t>(1, 2 * std::size_t(l2) / bytes + 1));
  return copies == 1 ? 1 : (copies + kCallsOfGraph - 1) / kCallsOfGraph * kCallsOfGraph;
}

/// Microseconds of a call. launch(copy, stream) queues one over that copy. Replays go on for
/// `seconds`, 9 at least.
template <typename Launch>
double time_per_call(int copies, double seconds, Launch launch) {
  cudaStream_t stream;
  check_cuda(cudaStreamCreate(&stream), "stream");
  std::vector<cudaGraphExec_t> graphs;
  for (int first = 0; first < copies; first += kCallsOfGraph) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kCallsOfGraph; ++i) launch((first + i) % copies, stream);
    check_cuda(cudaStreamEndCapture(stream, &graph), "end capture");
    check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    check_cuda(cudaGraphDestroy(graph), "destroy");
    graphs.push_back(exec);
  }
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin), "event");
  check_cuda(cudaEventCreate(&end), "event");
  std::vector<float> times;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0;; ++i) {
    check_cuda(cudaEventRecord(begin, stream), "record");
    check_cuda(cudaGraphLaunch(graphs[i % graphs.size()], stream), "launch");
    check_cuda(cudaEventRecord(end, stream), "record");
    check_cuda(cudaEventSynchronize(end), "replay");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 4) times.push_back(ms);  // The first replays warm up.
    const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - start;
    if (times.size() >= 9 && gone.count() > seconds) break;
  }
  for (cudaGraphExec_t exec : graphs) cudaGraphExecDestroy(exec);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2] * 1000.0 / kCallsOfGraph;
}

/// Bits of bf16 numbers, nearly normal with variance 1.
static __global__ void fill_random(std::uint16_t* data, std::size_t n, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    std::uint64_t x = i + (std::uint64_t{seed} << 40);
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 32;
    // Sum of four uniforms: near enough to a normal distribution of variance 1.
    float sum = 0;
    for (int k = 0; k < 4; ++k) {
      sum += static_cast<float>((x >> (16 * k)) & 0xffff) / 65536.f - 0.5f;
    }
    const __nv_bfloat16 v = __float2bfloat16(sum * 1.732f);
    data[i] = *reinterpret_cast<const std::uint16_t*>(&v);
  }
}
}  // namespace fovea::cuda::test
