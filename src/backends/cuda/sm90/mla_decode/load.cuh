// Loading: key tiles through the copy engine, queries; and output rows that nobody owns.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

/// Where the keys of a tile lie in the cache: box b brings those from b * k.box_rows on. A lane
/// copies boxes lane and lane + 32.
struct TileBoxes {
  std::int32_t block[2], row[2];
  int count;
  std::uint32_t box_bytes;

  __device__ __forceinline__ TileBoxes(const KernelParams& k, const Job& job, std::int32_t request,
                                       std::int32_t tile) {
    const std::int32_t* blocks = k.op.block_table + request * k.op.block_table_stride;
    const std::int32_t keys =
        tile < job.tile_end ? min(kKeyTile, job.seq_len - tile * kKeyTile) : 0;
    count = (keys + k.box_rows - 1) >> (__ffs(k.box_rows) - 1);
    box_bytes = k.box_rows * 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int box = threadIdx.x % 32 + 32 * i;
      const auto key = static_cast<std::uint32_t>(tile * kKeyTile + box * k.box_rows);
      block[i] = box < count ? __ldg(blocks + k.block_size.quotient(key)) : 0;
      row[i] = k.block_size.remainder(key);
    }
  }

  /// Copies a chunk of channels of all keys. Run by one warp.
  __device__ __forceinline__ void load(const CUtensorMap* map, int channel_chunk,
                                       std::uint8_t* destination, std::uint64_t& full,
                                       std::uint64_t policy) const {
    const int lane = threadIdx.x % 32;
    const std::uint32_t barrier = ptx::shared_address(&full);
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier, count * box_bytes);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int box = lane + 32 * i;
      if (box < count) {
        ptx::load_box(ptx::shared_address(destination) + box * box_bytes, map, channel_chunk * 64,
                      row[i], block[i], barrier, policy);
      }
    }
  }
};

/// Issues the copies of the block's key tiles. Run by one warp.
template <int kRows>
__device__ void load_tiles(const KernelParams& k, const CUtensorMap* map, const Job& job,
                           std::int32_t request, SharedMemory<kRows>& s,
                           RingPosition<SharedMemory<kRows>::kSlots>& ring, std::uint64_t policy) {
  TileBoxes boxes(k, job, request, job.tile_begin);
  ptx::wait_for_previous_kernel();  // It may have written rows, but not the table.
  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile) {
    TileBoxes next = boxes;
#pragma unroll 1
    for (int position = 0; position < kChunks; ++position) {
      ptx::mbarrier_wait(ptx::shared_address(&s.empty[ring.slot]), ring.parity ^ 1);
      boxes.load(map, channel_chunk(position), s.ring[ring.slot], s.full[ring.slot], policy);
      ring.advance(1);
      // Asked for nearly a tile ahead: the answer is here before the ring has room again.
      if (position == 0) next = TileBoxes(k, job, request, tile + 1);
    }
    boxes = next;
  }
}

/// Begins to copy Q [rows, 576] of the row tile to shared memory, in chunks of 64 channels; absent
/// rows are 0.
/// Run by kWarps warps; `chunk_of` gives the address of a channel chunk.
template <typename T, int kRows, int kWarps, typename ChunkOf>
__device__ __forceinline__ void load_query_rows(const KernelParams& k, const Job& job,
                                                ChunkOf chunk_of) {
  const MlaDecodeParams& op = k.op;
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int row = threadIdx.x / 32 % kWarps; row < kRows; row += kWarps) {
    const bool exists = row < job.num_rows;
    const QueryRow r(k, job, exists ? row : 0);
    const std::int64_t t = job.query_begin + std::int64_t{r.token};
    const auto* latent = reinterpret_cast<const uint4*>(static_cast<const T*>(op.q_latent) +
                                                        t * op.q_latent_token_stride +
                                                        r.head * op.q_latent_head_stride);
    const auto* pe = reinterpret_cast<const uint4*>(
        static_cast<const T*>(op.q_pe) + t * op.q_pe_token_stride + r.head * op.q_pe_head_stride);
    const auto to = [&](int chunk) {
      return ptx::shared_address(chunk_of(chunk)) + row * 128 + ((lane % 8) ^ (row % 8)) * 16;
    };
    ptx::copy_piece(to(lane / 8), latent + lane, exists);
    ptx::copy_piece(to(4 + lane / 8), latent + 32 + lane, exists);
    if (lane < 8) ptx::copy_piece(to(8), pe + lane, exists);
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
#pragma unroll 1
    for (int d = lane; d < kLatent; d += 32) store_element(op, offset + d, 0.f);
    if (lane == 0 && op.lse != nullptr) {
      op.lse[head * op.lse_head_stride + token * op.lse_token_stride] = -INFINITY;
    }
  }
}

}  // namespace fovea::cuda::mla
