// Which keys the rows of a tile see, and what becomes of the others.
#pragma once

#include "backends/cuda/sm90/finite.cuh"
#include "backends/cuda/sm90/mla_decode/block.cuh"
#include "variants/visibility.h"

namespace fovea::cuda::mla {

__device__ inline VisibleKeys visible_keys(const KernelParams& k, const Job& job) {
  const AttentionVariant& variant = k.op.variant;
  const auto position = [&](std::int32_t row) {
    return job.seq_len - job.query_len + static_cast<std::int32_t>(QueryRow(k, job, row).token);
  };
  std::int32_t first = position(0), last = position(max(job.num_rows, 1) - 1);
  VisibleKeys v{0, job.seq_len, 0, job.seq_len};
  if (variant.causal) v.any_end = last + 1, v.common_end = first + 1;
  if (k.op.draft_tree != nullptr) {  // Where in it rows stand is not looked up.
    v.common_end = first = job.seq_len - job.query_len;
    last = job.seq_len - 1;
  }
  if (variant.window_left >= 0) {
    const auto window = static_cast<std::int32_t>(variant.window_left);
    v.any_begin = first - window;
    v.common_begin = last - window;
  }
  return v;
}

/// Rows that do not exist see what the last one does.
__device__ inline SeenKeys seen_keys(const KernelParams& k, const Job& job, std::int32_t row) {
  const AttentionVariant& variant = k.op.variant;
  const std::int32_t existing = min(row, max(job.num_rows, 1) - 1);
  const auto token = static_cast<std::int32_t>(QueryRow(k, job, existing).token);
  const std::int32_t context = job.seq_len - job.query_len;
  SeenKeys seen{0, variant.causal ? context + token + 1 : job.seq_len, 0};
  std::int32_t depth = token;
  if (k.op.draft_tree != nullptr) {
    SequenceExtent extent{.num_queries = job.query_len, .num_keys = job.seq_len};
    extent.tree = k.op.draft_tree + job.query_begin;
    const std::int32_t query = min(token, job.query_len - 1);  // The tile may have no row.
    depth = static_cast<std::int32_t>(depth_in_tree(extent, query));
    seen.drafts = visible_drafts(variant, query, extent);
  }
  if (variant.window_left >= 0) {
    seen.begin = context + depth - static_cast<std::int32_t>(variant.window_left);
  }
  return seen;
}

/// Some keys of the tile that begins there are drafts of a tree.
__device__ __forceinline__ bool has_drafts(const KernelParams& k, const Job& job,
                                           std::int32_t first_key) {
  return k.op.draft_tree != nullptr && first_key + kKeyTile > job.seq_len - job.query_len;
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
