// What the threads of a block do together.
#pragma once

#include <cstdint>
#include <limits>

#include "backends/cuda/launch.h"

namespace fovea::cuda {

constexpr int kThreads = 128;  ///< Of a block, unless a kernel says otherwise.
constexpr int kWarps = kThreads / 32;

/// The same result in every thread, whatever the order of blocks. `combine` is commutative.
template <class T, class Combine>
__device__ T reduce_warp(T value, Combine combine) {
  for (int step = 16; step > 0; step /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, step));
  }
  return value;
}
/// Of all threads of a block, whole warps.
template <class T, class Combine>
__device__ T reduce_block(T value, Combine combine) {
  constexpr int kMostWarps = 32;
  __shared__ T of_warp[kMostWarps];
  value = reduce_warp(value, combine);
  __syncthreads();  // of_warp may still be read by an earlier call.
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) value = combine(value, of_warp[w]);
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

struct LaunchShape {
  std::int64_t blocks;  ///< None is fine.
  int threads = kThreads;
  std::int64_t shared_bytes = 0;
};

template <class... Params, class... Args>
void launch(const OpContext& ctx, const LaunchShape& shape, void (*kernel)(Params...),
            const Args&... args) {
  if (shape.blocks == 0) return;
  FOVEA_CHECK(shape.blocks <= std::numeric_limits<std::int32_t>::max(), unsupported,
              "{} rows and heads are more than a launch takes, 2^31 - 1", shape.blocks);
  const CurrentDevice current(ctx.memory.device);
  kernel<<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.threads),
           static_cast<std::size_t>(shape.shared_bytes), stream_of(ctx)>>>(args...);
  check(cudaGetLastError(), "launch");
}

template <class... Params, class... Args>
void launch(const OpContext& ctx, std::int64_t blocks, void (*kernel)(Params...),
            const Args&... args) {
  launch(ctx, LaunchShape{.blocks = blocks}, kernel, args...);
}

/// A team of `lanes` threads, a power of two up to a warp, for each of `teams`, below 2^31, and
/// some without: in order.
template <class... Params, class... Args>
void launch_teams(const OpContext& ctx, std::int64_t teams, int lanes, void (*kernel)(Params...),
                  const Args&... args) {
  const std::int64_t per_block = kThreads / lanes;
  FOVEA_CHECK(teams <= std::numeric_limits<std::int32_t>::max() - per_block, unsupported,
              "{} rows and heads are more than a launch takes, 2^31 - 1", teams);
  launch(ctx, (teams + per_block - 1) / per_block, kernel, args...);
}

template <class... Params, class... Args>
void launch_warps(const OpContext& ctx, std::int64_t warps, void (*kernel)(Params...),
                  const Args&... args) {
  launch_teams(ctx, warps, Warp::kSize, kernel, args...);
}

}  // namespace fovea::cuda
