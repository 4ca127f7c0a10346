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
__device__ T reduce_warp(T value, Combine combine) {
  for (int step = 16; step > 0; step /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, step));
  }
  return value;
}
template <class T, class Combine>
__device__ T reduce_block(T value, Combine combine) {
  __shared__ T of_warp[kWarps];
  value = reduce_warp(value, combine);
  __syncthreads();  // of_warp may still be read by an earlier call.
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[0];
  for (int w = 1; w < kWarps; ++w) value = combine(value, of_warp[w]);
  return value;
}

// Threads that work on something together.
struct Block {
  static constexpr int kSize = kThreads;
  __device__ static int rank() { return static_cast<int>(threadIdx.x); }
  __device__ static void sync() { __syncthreads(); }
  template <class T, class Combine>
  __device__ static T reduce(T value, Combine combine) {
    return reduce_block(value, combine);
  }
};
struct Warp {
  static constexpr int kSize = 32;
  __device__ static int rank() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static void sync() { __syncwarp(); }
  template <class T, class Combine>
  __device__ static T reduce(T value, Combine combine) {
    return reduce_warp(value, combine);
  }
};

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

/// A warp for each of `warps`, below 2^31, and some without: kWarps a block, in order.
template <class... Params, class... Args>
void launch_warps(const OpContext& ctx, std::int64_t warps, void (*kernel)(Params...),
                  const Args&... args) {
  FOVEA_CHECK(warps <= std::numeric_limits<std::int32_t>::max() - kWarps, unsupported,
              "{} rows and heads are more than a launch takes, 2^31 - 1", warps);
  launch_shared(ctx, (warps + kWarps - 1) / kWarps, 0, kernel, args...);
}

}  // namespace fovea::cuda
