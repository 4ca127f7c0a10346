// What the roles of a block share at tiles of 64 query rows, and its loading warp.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"
#include "backends/cuda/sm90/mla_decode/load.cuh"
#include "backends/cuda/sm90/mla_decode/wide.h"

namespace fovea::cuda::mla {

/// The halves of the output channels, and the warpgroups that own them. Of each pair of key tiles
/// the left warpgroup scores the first, the right one the second.
constexpr int kLeft = 0, kRight = 1;
constexpr int kRopeChunk = kChunks - 1;
constexpr int kSideBarrier = 3;  ///< Named barriers of the two sides: this and the next.

/// Shared memory of one block. Operand tiles come first: they are 1024-byte aligned.
struct WideMemory {
  std::uint8_t q[kChunks][kWideRows * 128];
  /// The key tile of each side. Once its scores are there, P [rows][64 keys] takes the place of
  /// the rope chunk.
  std::uint8_t keys[2][kChunks][kChunkBytes];
  float reference[2][kWideRows];  ///< Maxima that P is relative to, in order of stat_index.
  float sums[2][kWideRows];
  std::uint64_t full[2][kChunks];
  /// [tile][half]: the warpgroup that owns the half has read it. The other side's P is in it too.
  std::uint64_t empty[2][2];
  std::uint64_t p_full[2];
  SeenKeys seen[kWideRows];
  Handover<kWideRows> handover;

  /// Run by all threads; each warp has a few of the barriers.
  __device__ void init() {
    if (threadIdx.x % 32 != 0) return;
    const int warp = threadIdx.x / 32;
    if (warp < kChunks) {
      for (auto& tile : full) ptx::mbarrier_init(ptx::shared_address(&tile[warp]), 1);
    } else if (warp < kChunks + 2) {
      const int tile = warp - kChunks;
      ptx::mbarrier_init(ptx::shared_address(&p_full[tile]), 128);
      for (auto& half : empty[tile]) ptx::mbarrier_init(ptx::shared_address(&half), 4);  // Warps.
    } else if (warp == kChunks + 2) {
      handover.init(128);
    }
    ptx::mbarrier_init_fence();
  }
};

/// Copies half of a tile's chunks, in the order in which they are scored.
__device__ __forceinline__ void load_half(const TileBoxes& boxes, const CUtensorMap* map, int tile,
                                          int half, std::uint32_t turn, WideMemory& s,
                                          std::uint64_t policy) {
  ptx::mbarrier_wait(ptx::shared_address(&s.empty[tile][half]), (turn & 1) ^ 1);
  // P of a tile, in place of the rope chunk, is the last that the other side reads of it.
  const int count = kChunksPerOutput + (half != tile);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int chunk = i == kChunksPerOutput ? kRopeChunk : half * kChunksPerOutput + i;
    boxes.load(map, chunk, s.keys[tile][chunk], s.full[tile][chunk], policy);
  }
}

/// Issues the copies of the block's key tiles in the order in which their places become free.
/// `turn` counts the tiles of each side. Run by one warp.
__device__ inline void load_pairs(const KernelParams& k, const CUtensorMap* map, const Job& job,
                                  std::int32_t request, WideMemory& s, std::uint32_t (&turn)[2],
                                  std::uint64_t policy) {
  TileBoxes first(k, job, request, job.tile_begin), second(k, job, request, job.tile_begin + 1);
  ptx::wait_for_previous_kernel();  // It may have written rows, but not the table.
  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; tile += 2) {
    load_half(first, map, 0, kLeft, turn[0], s, policy);
    load_half(first, map, 0, kRight, turn[0], s, policy);
    // Asked for nearly a pair ahead: the answer is here before there is room again.
    first = TileBoxes(k, job, request, tile + 2);
    ++turn[0];
    if (tile + 1 < job.tile_end) {
      load_half(second, map, 1, kRight, turn[1], s, policy);
      load_half(second, map, 1, kLeft, turn[1], s, policy);
      second = TileBoxes(k, job, request, tile + 3);
      ++turn[1];
    }
  }
}

}  // namespace fovea::cuda::mla
