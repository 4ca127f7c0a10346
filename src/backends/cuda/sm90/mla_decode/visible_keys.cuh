// Which keys the rows of a tile see, and what becomes of the others.
#pragma once

#include "backends/cuda/sm90/finite.cuh"
#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

/// The keys that the rows of a tile see.
struct VisibleKeys {
  std::int32_t first_position;            ///< Of the first row's query token in its sequence.
  std::int32_t any_begin, any_end;        ///< Some row sees them.
  std::int32_t common_begin, common_end;  ///< Every row sees them.

  /// Every row sees all keys of the tile that begins there.
  __device__ bool whole_tile(std::int32_t first_key) const {
    return first_key >= common_begin && first_key + kKeyTile <= common_end;
  }
};

__device__ inline VisibleKeys visible_keys(const KernelParams& k, const Job& job) {
  const MlaDecodeParams& op = k.op;
  const auto position = [&](std::int32_t row) {
    return job.seq_len - job.query_len + static_cast<std::int32_t>(QueryRow(k, job, row).token);
  };
  const std::int32_t first = position(0), last = position(max(job.num_rows, 1) - 1);
  VisibleKeys v{first, 0, job.seq_len, 0, job.seq_len};
  if (op.causal) v.any_end = last + 1, v.common_end = first + 1;
  if (op.window_left >= 0) {
    v.any_begin = first - op.window_left;
    v.common_begin = last - op.window_left;
  }
  return v;
}

/// Zeros those values of a tile that would spoil outputs, for 0 * NaN is NaN: of keys that no row
/// sees, and of keys that only some of the rows see and that hold a NaN or an infinity, for which
/// rows that see them have a NaN in their weight already. Run by a warpgroup once S is there, which
/// needs the keys as they are. `chunk_of` gives the address of a channel chunk.
template <typename T, typename ChunkOf>
__device__ __forceinline__ void zero_spoiling_keys(const VisibleKeys& visible,
                                                   std::int32_t first_key, ChunkOf chunk_of) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
#pragma unroll 1
  for (int key = warp; key < kKeyTile; key += 4) {
    const std::int32_t at = first_key + key;
    if (at >= visible.common_begin && at < visible.common_end) continue;
    uint4* pieces[2];
    bool spoils = at < visible.any_begin || at >= visible.any_end;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pieces[i] = reinterpret_cast<uint4*>(chunk_of(lane / 8 + 4 * i)) + key * 8 + lane % 8;
      spoils = spoils || any_not_finite<T>(*pieces[i]);
    }
    if (__any_sync(~0u, spoils)) *pieces[0] = *pieces[1] = uint4{0, 0, 0, 0};
  }
  ptx::fence_async_proxy();
}

}  // namespace fovea::cuda::mla
