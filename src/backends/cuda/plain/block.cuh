// What the threads of a block do together.
#pragma once

#include <cstdint>
#include <limits>

#include "backends/cuda/launch.h"

namespace fovea::cuda {

constexpr int kThreads = 128;  ///< Of a block, in every plain kernel.
constexpr int kWarps = kThreads / 32;

/// The same result in every thread, whatever the order of blocks. `combine` is commutative.
template <class T, class Combine>
__device__ T reduce_block(T value, Combine combine) {
  __shared__ T of_warp[kWarps];
  for (int step = 16; step > 0; step /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, step));
  }
  __syncthreads();  // of_warp may still be read by an earlier call.
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[0];
  for (int w = 1; w < kWarps; ++w) value = combine(value, of_warp[w]);
  return value;
}

/// 1 / sqrt(mean(x^2) + eps) of a row whose channel i is channel(i), in every thread.
template <class Channel>
__device__ double rms_norm_scale(std::int64_t width, float eps, const Channel& channel) {
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < width; i += kThreads) {
    const double x = channel(i);
    sum += x * x;
  }
  sum = reduce_block(sum, [](double a, double b) { return a + b; });
  return 1 / sqrt(sum / static_cast<double>(width) + static_cast<double>(eps));
}

/// `blocks` blocks of kThreads threads; none is fine.
template <class... Params, class... Args>
void launch_shared(const OpContext& ctx, std::int64_t blocks, std::int64_t shared_bytes,
                   void (*kernel)(Params...), const Args&... args) {
  if (blocks == 0) return;
  FOVEA_CHECK(blocks <= std::numeric_limits<std::int32_t>::max(), unsupported,
              "{} rows and heads are more than a launch takes, 2^31 - 1", blocks);
  const CurrentDevice current(ctx.memory.device);
  kernel<<<static_cast<unsigned>(blocks), kThreads, static_cast<std::size_t>(shared_bytes),
           stream_of(ctx)>>>(args...);
  check(cudaGetLastError(), "launch");
}

template <class... Params, class... Args>
void launch(const OpContext& ctx, std::int64_t blocks, void (*kernel)(Params...),
            const Args&... args) {
  launch_shared(ctx, blocks, 0, kernel, args...);
}

}  // namespace fovea::cuda
