// The loading warps: key tiles through the copy engine, and output rows that nobody owns.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

/// Issues the copies of the block's key tiles. Run by one warp.
template <int kRows>
__device__ void load_tiles(const KernelParams& k, const CUtensorMap* map, const Job& job,
                           std::int32_t request, SharedMemory<kRows>& s,
                           RingPosition<SharedMemory<kRows>::kSlots>& ring, std::uint64_t policy) {
  const int lane = threadIdx.x % 32;
  const std::int32_t box_rows = k.box_rows;
  const auto block_size = static_cast<std::uint32_t>(k.op.block_size);
  const std::int32_t* blocks = k.op.block_table + request * k.op.block_table_stride;
  // Box b of a tile holds its keys from b * box_rows on; a lane issues boxes lane and lane + 32.
  const auto block_of = [&](std::int32_t tile, int box) {
    const std::int32_t key = tile * kKeyTile + box * box_rows;
    const bool exists = tile < job.tile_end && box * box_rows < kKeyTile && key < job.seq_len;
    return exists ? __ldg(blocks + static_cast<std::uint32_t>(key) / block_size) : 0;
  };
  std::int32_t block[2] = {block_of(job.tile_begin, lane), block_of(job.tile_begin, lane + 32)};
  ptx::wait_for_previous_kernel();  // It may have written rows, but not the table.
  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile) {
    // Asked for one tile ahead: the answer is here before the ring has room again.
    const std::int32_t next[2] = {block_of(tile + 1, lane), block_of(tile + 1, lane + 32)};
    const std::int32_t keys = min(kKeyTile, job.seq_len - tile * kKeyTile);
    const int boxes = (keys + box_rows - 1) / box_rows;
    std::int32_t row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] =
          static_cast<std::uint32_t>(tile * kKeyTile + (lane + 32 * i) * box_rows) % block_size;
    }
    for (int position = 0; position < kChunks; ++position) {
      const std::uint32_t full = ptx::shared_address(&s.full[ring.slot]);
      ptx::mbarrier_wait(ptx::shared_address(&s.empty[ring.slot]), ring.parity ^ 1);
      if (lane == 0) ptx::mbarrier_arrive_expect(full, boxes * box_rows * 128);
      __syncwarp();
      const std::uint32_t chunk = ptx::shared_address(s.ring[ring.slot]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int box = lane + 32 * i;
        if (box < boxes) {
          ptx::load_box(chunk + box * box_rows * 128, map, channel_chunk(position) * 64, row[i],
                        block[i], full, policy);
        }
      }
      ring.advance(1);
    }
    block[0] = next[0];
    block[1] = next[1];
  }
}

/// Zeros and -inf for output rows that belong to no request. Run by `workers` warps in all.
__device__ inline void clear_unused_rows(const MlaDecodeParams& op, int worker, int workers) {
  const int lane = threadIdx.x % 32;
  const std::int64_t first = __ldg(op.query_start_loc + op.num_requests);
  const std::int64_t rows = (op.num_tokens - first) * op.num_heads;
  for (std::int64_t r = worker; r < rows; r += workers) {
    const std::int64_t token = first + r / op.num_heads;
    const std::int64_t head = r % op.num_heads;
    const std::int64_t offset = token * op.out_token_stride + head * op.out_head_stride;
    for (int d = lane; d < kLatent; d += 32) store_element(op, offset + d, 0.f);
    if (lane == 0 && op.lse != nullptr) {
      op.lse[head * op.lse_head_stride + token * op.lse_token_stride] = -INFINITY;
    }
  }
}

}  // namespace fovea::cuda::mla
