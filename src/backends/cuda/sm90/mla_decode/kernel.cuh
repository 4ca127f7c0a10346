// MLA decode for compute capability 9.0. README.md beside this draws the schedule.
//
// Keys stand on the M side of every product, query rows (tokens x heads) on the N side:
//   S^T [64 keys, rows]  = K [64, 576] Q^T [576, rows]     one warpgroup
//   O^T [512, rows]     += V^T [512, 64] P^T [64, rows]    two warpgroups, 256 channels each
// so that 16 rows cost a quarter of 64. V is K's first 512 channels: one tile in shared memory,
// read along its rows for S and across them for O.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "backends/cuda/sm90/mla_decode/params.h"
#include "backends/cuda/sm90/mla_decode/schedule.cuh"
#include "backends/cuda/sm90/ptx/barrier.cuh"
#include "backends/cuda/sm90/ptx/copy.cuh"
#include "backends/cuda/sm90/ptx/wgmma.cuh"

namespace fovea::cuda::mla {

constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kChunks = (kLatent + kRope) / 64;  ///< A tile travels as 9 chunks [64 keys, 64 ch].
constexpr int kChunkBytes = kKeyTile * 64 * 2;
constexpr int kOutputWarpgroups = 2;
constexpr int kOutputThreads = kOutputWarpgroups * 128;
constexpr int kChunksPerOutput = kLatent / 64 / kOutputWarpgroups;
constexpr int kThreads = 512;  ///< Two output warpgroups, one for scores, one that loads.
constexpr float kLog2e = 1.4426950408889634f;
/// The reference maximum lags behind the true one by at most this (log2): probabilities reach 256,
/// exact enough in both 16-bit types, and the outputs are rescaled a few times per sequence only.
constexpr float kMaxLag = 8.f;

/// Chunks travel in the order rope, then one of each output warpgroup in turn, so that both can
/// begin, and free what they read, as early as possible.
__host__ __device__ constexpr int channel_chunk(int position) {
  return position == 0 ? 8 : (position - 1) % 2 * kChunksPerOutput + (position - 1) / 2;
}
__host__ __device__ constexpr int position_of(int channel_chunk) {
  return channel_chunk == 8
             ? 0
             : 1 + channel_chunk % kChunksPerOutput * 2 + channel_chunk / kChunksPerOutput;
}

/// Shared memory of one block. Operand tiles come first: they are 1024-byte aligned.
template <int kRows>
struct SharedMemory {
  /// As many chunks as fit in 227 KB beside the rest.
  static constexpr int kSlots = kRows == 64 ? 18 : kRows == 32 ? 23 : 25;

  std::uint8_t ring[kSlots][kChunkBytes];  ///< Chunks on their way; at the end of a job of a
                                           ///< cluster, its output [512 x rows] f32 in fragments.
  std::uint8_t q[kChunks][kRows * 128];
  std::uint8_t p[kRows * 128];  ///< P^T [rows][64 keys]
  float message[2][kRows];  ///< With P: [0] factors of the output. At the end: max (log2) and sum.
  float warp_max[2][4][kRows];
  std::uint64_t full[kSlots];
  std::uint64_t empty[kSlots];
  std::uint64_t p_full;
  std::uint64_t p_empty;
  std::int32_t rescale;       ///< Some factor of the message is not 1.
  std::int32_t last_arriver;  ///< This block merges.
};

struct KernelParams {
  MlaDecodeParams op;
  MlaDecodeGeometry geometry;
  std::int32_t box_rows;     ///< Keys that one copy brings.
  const GroupRange* ranges;  ///< [num_groups]
  std::uint32_t* counters;   ///< [2 num_groups][row_tiles_per_group][splits_per_group]
  float* partial_stats;      ///< The same, then [2][rows].
  float* partial_out;        ///< [2 num_groups][row_tiles_per_group][512 * rows] in fragments.
};

/// What a block does for one job of its group.
struct Job {
  std::int32_t seq_len, query_begin, query_len;
  std::int32_t first_row;              ///< Of the block's row tile, among the request's rows.
  std::int32_t num_rows;               ///< Rows of the tile that exist; may be 0.
  std::int32_t tile_begin, tile_end;   ///< Key tiles of this block.
  std::int32_t first_unit, num_units;  ///< Of the whole job.
  bool whole;                          ///< The group covers all keys of the job.
  std::int32_t slot;                   ///< Of the partial result, otherwise.
};

/// Walks the jobs of a group; every role of a block walks the same list.
class JobWalk {
 public:
  __device__ JobWalk(const KernelParams& k, std::int32_t group, std::int32_t rows,
                     std::int32_t row_tile, std::int32_t split)
      : k_(k), group_(group), rows_(rows), row_tile_(row_tile), split_(split) {
    const int4* words = reinterpret_cast<const int4*>(k.ranges + group);
    const int4 a = __ldg(words), b = __ldg(words + 1), c = __ldg(words + 2);
    request_ = a.x, job_ = a.y, tile_ = a.z, units_left_ = a.w;
    first_unit_ = b.x, total_units_ = b.y, seq_len_ = b.z, query_begin_ = b.w;
    query_len_ = c.x, groups_ = c.y;
  }

  __device__ bool next(Job& job) {
    if (units_left_ == 0) return false;
    if (!first_) advance();
    const std::int32_t units = units_of(seq_len_);
    const std::int32_t take = min(units - tile_, units_left_);
    const std::int32_t splits = k_.geometry.splits_per_group;
    job.seq_len = seq_len_;
    job.query_begin = query_begin_;
    job.query_len = query_len_;
    job.first_row = (job_ * k_.geometry.row_tiles_per_group + row_tile_) * rows_;
    job.num_rows = max(0, min(rows_, query_len_ * k_.op.num_heads - job.first_row));
    const bool empty = seq_len_ <= 0 || job.num_rows == 0;
    job.tile_begin = empty ? 0 : tile_ + take * split_ / splits;
    job.tile_end = empty ? 0 : tile_ + take * (split_ + 1) / splits;
    job.first_unit = first_unit_;
    job.num_units = units;
    job.whole = take == units;
    job.slot = 2 * group_ + (first_ ? 0 : 1);
    units_left_ -= take;
    first_ = false;
    return true;
  }

  __device__ std::int32_t total_units() const { return total_units_; }
  __device__ std::int32_t groups() const { return groups_; }

 private:
  __device__ void advance() {
    first_unit_ += units_of(seq_len_);
    tile_ = 0;
    const std::int32_t rows_per_job = rows_ * k_.geometry.row_tiles_per_group;
    if ((++job_) * rows_per_job < query_len_ * k_.op.num_heads) return;
    job_ = 0;
    do {
      ++request_;
      query_begin_ = __ldg(k_.op.query_start_loc + request_);
      query_len_ = __ldg(k_.op.query_start_loc + request_ + 1) - query_begin_;
    } while (query_len_ == 0);
    seq_len_ = __ldg(k_.op.seq_lens + request_);
  }

  const KernelParams& k_;
  std::int32_t group_, rows_, row_tile_, split_;
  std::int32_t request_, job_, tile_, units_left_, first_unit_, total_units_, groups_;
  std::int32_t seq_len_, query_begin_, query_len_;
  bool first_ = true;

 public:
  __device__ std::int32_t request() const { return request_; }
};

/// A position in the ring of chunks and the parity of its turn.
template <int kSlots>
struct RingPosition {
  std::uint32_t slot = 0;
  std::uint32_t parity = 0;
  __device__ void advance(int n) {
    slot += n;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
  /// The same, known to the compiler to be one for the warp: operand descriptors live in uniform
  /// registers.
  __device__ RingPosition uniform() const {
    return {__shfl_sync(~0u, slot, 0), __shfl_sync(~0u, parity, 0)};
  }
  __device__ RingPosition plus(int n) const {
    RingPosition moved = *this;
    moved.advance(n);
    return moved;
  }
};

/// 2^x, 2 units off at most; -inf gives 0, NaN stays.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(v);
  } else {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(v);
  }
}

__device__ __forceinline__ std::int64_t out_offset(const MlaDecodeParams& op, const Job& job,
                                                   std::int32_t row) {
  const std::uint32_t r = job.first_row + row;
  const std::uint32_t token = r / static_cast<std::uint32_t>(op.num_heads);
  const std::uint32_t head = r - token * op.num_heads;
  return (job.query_begin + static_cast<std::int64_t>(token)) * op.out_token_stride +
         head * op.out_head_stride;
}

__device__ __forceinline__ void store_element(const MlaDecodeParams& op, std::int64_t offset,
                                              float value) {
  switch (op.out_type) {
    case ElementType::f32:
      static_cast<float*>(op.out)[offset] = value;
      break;
    case ElementType::f16:
      static_cast<__half*>(op.out)[offset] = __float2half_rn(value);
      break;
    case ElementType::bf16:
      static_cast<__nv_bfloat16*>(op.out)[offset] = __float2bfloat16_rn(value);
      break;
  }
}

/// `max` in log2 units and `sum` relative to it; sum 0 is a row that sees nothing.
__device__ __forceinline__ void store_lse(const MlaDecodeParams& op, const Job& job,
                                          std::int32_t row, float max, float sum) {
  if (op.lse == nullptr || row >= job.num_rows) return;
  const std::uint32_t r = job.first_row + row;
  const std::uint32_t token = r / static_cast<std::uint32_t>(op.num_heads);
  const std::uint32_t head = r - token * op.num_heads;
  constexpr float kLn2 = 0.6931471805599453f;
  op.lse[head * op.lse_head_stride +
         (job.query_begin + static_cast<std::int64_t>(token)) * op.lse_token_stride] =
      sum == 0.f ? -INFINITY : (max + log2f(sum)) * kLn2;
}

__device__ __forceinline__ float inverse_sum(float sum) { return sum == 0.f ? 0.f : 1.f / sum; }

/// Weight of a partial result whose maximum is `own`. An empty one carries none.
__device__ __forceinline__ float merge_weight(float own, float max) {
  return own == -INFINITY ? 0.f : exp2_approx(own - max);
}

// ------------------------------------------------------------------------------------ loading

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

// ------------------------------------------------------------------------------------ scores

/// Q [rows, 576] of the row tile to shared memory, chunks in travelling order; absent rows are 0.
template <typename T, int kRows>
__device__ void load_query(const KernelParams& k, const Job& job, SharedMemory<kRows>& s) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const MlaDecodeParams& op = k.op;
  constexpr int kBatch = 4;  // Rows in flight per warp: 12 loads of 16 bytes a lane.
  for (int first = warp; first < kRows; first += 4 * kBatch) {
    uint4 piece[kBatch][3];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = first + 4 * b;
      piece[b][0] = piece[b][1] = piece[b][2] = uint4{0, 0, 0, 0};
      if (row < job.num_rows) {
        const std::uint32_t r = job.first_row + row;
        const std::uint32_t token = r / static_cast<std::uint32_t>(op.num_heads);
        const std::uint32_t head = r - token * op.num_heads;
        const std::int64_t t = job.query_begin + static_cast<std::int64_t>(token);
        const auto* latent = reinterpret_cast<const uint4*>(static_cast<const T*>(op.q_latent) +
                                                            t * op.q_latent_token_stride +
                                                            head * op.q_latent_head_stride);
        const auto* pe = reinterpret_cast<const uint4*>(
            static_cast<const T*>(op.q_pe) + t * op.q_pe_token_stride + head * op.q_pe_head_stride);
        piece[b][0] = __ldg(latent + lane);
        piece[b][1] = __ldg(latent + lane + 32);
        if (lane < 8) piece[b][2] = __ldg(pe + lane);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = first + 4 * b;
      const int swizzled = ((lane % 8) ^ (row % 8)) * 16;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int chunk = i * 4 + lane / 8;
        if (chunk < kChunks) {
          *reinterpret_cast<uint4*>(s.q[position_of(chunk)] + row * 128 + swizzled) = piece[b][i];
        }
      }
    }
  }
}

constexpr int kScoreBarrier = 1;  // Named barriers; 0 is the whole block's.
constexpr int kOutputBarrier = 2;

/// The keys that row tile column `column` sees: [0, limit).
__device__ __forceinline__ std::int32_t visible_keys(const MlaDecodeParams& op, const Job& job,
                                                     int column) {
  if (!op.causal) return job.seq_len;
  const auto query = static_cast<std::int32_t>(static_cast<std::uint32_t>(job.first_row + column) /
                                               static_cast<std::uint32_t>(op.num_heads));
  return job.seq_len - job.query_len + 1 + query;
}

/// Scores, softmax and P of the block's key tiles. Run by one warpgroup.
template <typename T, int kRows>
__device__ void score_tiles(const KernelParams& k, const Job& job, SharedMemory<kRows>& s,
                            RingPosition<SharedMemory<kRows>::kSlots>& ring,
                            std::uint32_t& message) {
  constexpr int kBlocks = kRows / 8;  // Column blocks of the fragments.
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int g = lane / 4;
  const int c = lane % 4;
  const float scale = k.op.sm_scale * kLog2e;
  const std::uint64_t q_operand = ptx::swizzled_operand(ptx::shared_address(s.q[0]));
  constexpr std::uint32_t kQueryChunk = kRows * 128 >> 4;
  const std::int32_t common_limit = visible_keys(k.op, job, 0);

  // Reference maximum of columns 8 g + 2 c and the next (log2 units); sums of this thread's keys.
  float max0 = -INFINITY, max1 = -INFINITY;
  float sum[kBlocks][2];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) sum[j][0] = sum[j][1] = 0.f;

  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile) {
    const std::int32_t keys = job.seq_len - tile * kKeyTile;
    if (keys < kKeyTile) {
      // What lies behind the last key may be NaN, and 0 * NaN would spoil the output.
      for (int position = 0; position < kChunks; ++position) {
        const auto at = ring.plus(position);
        ptx::mbarrier_wait(ptx::shared_address(&s.full[at.slot]), at.parity);
        auto* rows = reinterpret_cast<uint4*>(s.ring[at.slot]);
        for (int i = keys * 8 + threadIdx.x % 128; i < kKeyTile * 8; i += 128) {
          rows[i] = uint4{0, 0, 0, 0};
        }
      }
      ptx::fence_async_proxy();
      ptx::named_barrier(kScoreBarrier, 128);
    }

    // S^T [64 keys, rows] = sum over 9 chunks of K [64, 64] Q^T [64, rows].
    const auto tile_ring = ring.uniform();
    float score[kRows / 2];
    // All chunks first, then products without a break: 6% faster at 64 rows than chunk by chunk.
#pragma unroll
    for (int position = 0; position < kChunks; ++position) {
      const auto at = tile_ring.plus(position);
      ptx::mbarrier_wait(ptx::shared_address(&s.full[at.slot]), at.parity);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int position = 0; position < kChunks; ++position) {
      const auto at = tile_ring.plus(position);
      const std::uint64_t k_operand = ptx::swizzled_operand(ptx::shared_address(s.ring[at.slot]));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma<T, ptx::AMajor::k, kRows>(score, k_operand + step * 2,
                                             q_operand + position * kQueryChunk + step * 2,
                                             position + step > 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(score);
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[ring.slot]));  // Rope chunk.
    ring.advance(kChunks);

#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) score[i] *= scale;
    if ((tile + 1) * kKeyTile > common_limit) {
      const std::int32_t key = tile * kKeyTile + warp * 16 + g;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const std::int32_t limit = visible_keys(k.op, job, 8 * j + 2 * c + b);
          if (key >= limit) score[4 * j + b] = -INFINITY;
          if (key + 8 >= limit) score[4 * j + 2 + b] = -INFINITY;
        }
      }
    }

    // Maximum of each column: over the lanes of a warp, then over the warps.
    float mine0 = -INFINITY, mine1 = -INFINITY;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      float a = fmaxf(score[4 * j], score[4 * j + 2]);
      float b = fmaxf(score[4 * j + 1], score[4 * j + 3]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        a = fmaxf(a, __shfl_xor_sync(~0u, a, step));
        b = fmaxf(b, __shfl_xor_sync(~0u, b, step));
      }
      if (g == j) mine0 = a, mine1 = b;
    }
    float(&warp_max)[4][kRows] = s.warp_max[tile & 1];
    const int own_column = (g < kBlocks ? 8 * g : 0) + 2 * c;
    if (g < kBlocks) {
      *reinterpret_cast<float2*>(&warp_max[warp][own_column]) = float2{mine0, mine1};
    }
    ptx::named_barrier(kScoreBarrier, 128);
    float2 tile_max = *reinterpret_cast<const float2*>(&warp_max[0][own_column]);
#pragma unroll
    for (int w = 1; w < 4; ++w) {
      const float2 other = *reinterpret_cast<const float2*>(&warp_max[w][own_column]);
      tile_max.x = fmaxf(tile_max.x, other.x);
      tile_max.y = fmaxf(tile_max.y, other.y);
    }
    const bool keep0 = tile_max.x <= max0 + kMaxLag;
    const bool keep1 = tile_max.y <= max1 + kMaxLag;
    const float factor0 = keep0 ? 1.f : exp2_approx(max0 - tile_max.x);
    const float factor1 = keep1 ? 1.f : exp2_approx(max1 - tile_max.y);
    if (!keep0) max0 = tile_max.x;
    if (!keep1) max1 = tile_max.y;
    const bool rescale = __any_sync(~0u, !(keep0 && keep1));

    if (rescale) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        sum[j][0] *= __shfl_sync(~0u, factor0, 4 * j + c);
        sum[j][1] *= __shfl_sync(~0u, factor1, 4 * j + c);
      }
    }
    // P = 2^(score - max), against 0 where nothing is visible yet.
    const float base0 = max0 == -INFINITY ? 0.f : max0;
    const float base1 = max1 == -INFINITY ? 0.f : max1;
    std::uint32_t packed[kBlocks][2];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float a = __shfl_sync(~0u, base0, 4 * j + c);
      const float b = __shfl_sync(~0u, base1, 4 * j + c);
      const float p0 = exp2_approx(score[4 * j] - a), p1 = exp2_approx(score[4 * j + 1] - b);
      const float p2 = exp2_approx(score[4 * j + 2] - a), p3 = exp2_approx(score[4 * j + 3] - b);
      sum[j][0] += p0 + p2;
      sum[j][1] += p1 + p3;
      packed[j][0] = pack<T>(p0, p1);
      packed[j][1] = pack<T>(p2, p3);
    }

    ptx::mbarrier_wait(ptx::shared_address(&s.p_empty), (message & 1) ^ 1);
    ++message;
    // P^T [rows][64 keys]: lane l addresses row l % 8 of matrix l / 8 (column block, key half).
    const int row = lane / 16 * 8 + lane % 8;
    const int piece = warp * 2 + lane / 8 % 2;
    const std::uint32_t p = ptx::shared_address(s.p) + row * 128 + ((piece ^ (row % 8)) << 4);
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      ptx::store_matrices_transposed(p + j * 8 * 128, packed[j][0], packed[j][1], packed[j + 1][0],
                                     packed[j + 1][1]);
    }
    if (warp == 0) {
      if (g < kBlocks) {
        *reinterpret_cast<float2*>(&s.message[0][own_column]) = float2{factor0, factor1};
      }
      if (lane == 0) s.rescale = rescale;
    }
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive(ptx::shared_address(&s.p_full));
  }

  // The last message: maxima and sums.
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      sum[j][0] += __shfl_xor_sync(~0u, sum[j][0], step);
      sum[j][1] += __shfl_xor_sync(~0u, sum[j][1], step);
    }
  }
  ptx::named_barrier(kScoreBarrier, 128);  // Everyone has read the last tile's maxima.
  if (g == 0) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      *reinterpret_cast<float2*>(&s.warp_max[0][warp][8 * j + 2 * c]) =
          float2{sum[j][0], sum[j][1]};
    }
  }
  ptx::named_barrier(kScoreBarrier, 128);
  ptx::mbarrier_wait(ptx::shared_address(&s.p_empty), (message & 1) ^ 1);
  ++message;
  if (warp == 0 && g < kBlocks) {
    const int column = 8 * g + 2 * c;
    float2 total{0.f, 0.f};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(&s.warp_max[0][w][column]);
      total.x += part.x;
      total.y += part.y;
    }
    *reinterpret_cast<float2*>(&s.message[0][column]) = float2{max0, max1};
    *reinterpret_cast<float2*>(&s.message[1][column]) = total;
  }
  ptx::named_barrier(kScoreBarrier, 128);  // The sums are read before the next job's maxima come.
  ptx::mbarrier_arrive(ptx::shared_address(&s.p_full));
}

// ------------------------------------------------------------------------------------ outputs

/// O^T of one warpgroup: 4 tiles of [64 channels, rows].
template <int kRows>
using OutputFragment = float[kChunksPerOutput][kRows / 2];

/// O^T [256 channels, rows] += V^T [256, 64] P^T [64, rows] over the block's key tiles. Leaves the
/// last message to be read by the caller.
template <typename T, int kRows>
__device__ void accumulate_tiles(const Job& job, SharedMemory<kRows>& s,
                                 RingPosition<SharedMemory<kRows>::kSlots>& ring,
                                 std::uint32_t& message, OutputFragment<kRows>& out) {
  constexpr int kBlocks = kRows / 8;
  const int lane = threadIdx.x % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int c = lane % 4;
  const std::uint64_t p_operand = ptx::swizzled_operand(ptx::shared_address(s.p));
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int e = 0; e < kRows / 2; ++e) out[i][e] = 0.f;
  }
  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile) {
    ptx::mbarrier_wait(ptx::shared_address(&s.p_full), message & 1);
    ++message;
    if (s.rescale) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const float2 factor = *reinterpret_cast<const float2*>(&s.message[0][8 * j + 2 * c]);
#pragma unroll
        for (int i = 0; i < kChunksPerOutput; ++i) {
          out[i][4 * j] *= factor.x;
          out[i][4 * j + 1] *= factor.y;
          out[i][4 * j + 2] *= factor.x;
          out[i][4 * j + 3] *= factor.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) ptx::pin(out[i]);
    const auto tile_ring = ring.uniform();
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
      const auto at = tile_ring.plus(1 + 2 * i + warpgroup);
      const std::uint64_t v_operand = ptx::swizzled_operand(ptx::shared_address(s.ring[at.slot]));
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // 16 keys: 16 rows of 128 bytes.
        ptx::wgmma<T, ptx::AMajor::m, kRows>(out[i], v_operand + step * (16 * 128 >> 4),
                                             p_operand + step * 2, true);
      }
      ptx::wgmma_commit();
    }
    const auto release = [&](int i) {
      if (lane == 0) {
        ptx::mbarrier_arrive(ptx::shared_address(&s.empty[ring.plus(1 + 2 * i + warpgroup).slot]));
      }
    };
    ptx::wgmma_wait<3>();
    release(0);
    ptx::wgmma_wait<2>();
    release(1);
    ptx::wgmma_wait<1>();
    release(2);
    ptx::wgmma_wait<0>();
    release(3);
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) ptx::pin(out[i]);
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.p_empty));
    ring.advance(kChunks);
  }
  ptx::mbarrier_wait(ptx::shared_address(&s.p_full), message & 1);
  ++message;
}

/// Where a thread's four values of chunk `chunk`, column block `j` lie in a whole result
/// [512 x rows]: 128 threads' float4 side by side.
template <int kRows>
__device__ __forceinline__ int fragment_index(int chunk, int j, int thread) {
  return (chunk * (kRows / 8) + j) * 128 + thread;
}

/// Writes normalised outputs straight from the fragments.
template <typename T, int kRows>
__device__ void store_output(const KernelParams& k, const Job& job, const SharedMemory<kRows>& s,
                             const OutputFragment<kRows>& out) {
  constexpr int kBlocks = kRows / 8;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int first_channel = threadIdx.x / 128 * kChunksPerOutput * 64 + thread / 32 * 16;
  const MlaDecodeParams& op = k.op;
  for (int row = threadIdx.x; row < kRows; row += kOutputThreads) {
    store_lse(op, job, row, s.message[0][row], s.message[1][row]);
  }
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const float2 sums = *reinterpret_cast<const float2*>(&s.message[1][8 * j + 2 * c]);
    const float inverse0 = inverse_sum(sums.x), inverse1 = inverse_sum(sums.y);
    if (op.out_type == ElementType::f32) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int row = 8 * j + 2 * c + b;
        if (row >= job.num_rows) continue;
        float* to = static_cast<float*>(op.out) + out_offset(op, job, row) + first_channel + g;
        const float inverse = b == 0 ? inverse0 : inverse1;
#pragma unroll
        for (int i = 0; i < kChunksPerOutput; ++i) {
          to[i * 64] = out[i][4 * j + b] * inverse;
          to[i * 64 + 8] = out[i][4 * j + 2 + b] * inverse;
        }
      }
      continue;
    }
    // A transposition across the warp brings a row's neighbouring channels together.
    const int row = 8 * j + g;
    const bool exists = row < job.num_rows;
    std::uint16_t* to = static_cast<std::uint16_t*>(op.out) +
                        (exists ? out_offset(op, job, row) : 0) + first_channel + 2 * c;
    const bool bf16 = op.out_type == ElementType::bf16;
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = out[i][4 * j + 2 * half] * inverse0;
        const float b = out[i][4 * j + 2 * half + 1] * inverse1;
        const std::uint32_t turned =
            ptx::transpose_matrix(bf16 ? pack<__nv_bfloat16>(a, b) : pack<__half>(a, b));
        if (exists) *reinterpret_cast<std::uint32_t*>(to + i * 64 + half * 8) = turned;
      }
    }
  }
}

/// One float4 of a merged result: 2 channels (8 apart) x 2 rows.
struct MergedValue {
  float4 value;  ///< Sum of weight * value.
  float2 max;    ///< Of the two rows.
  float2 sum;
};

/// Merges `count` results: stats(i) gives (max, max), (sum, sum) of the two rows, value(i) the
/// float4. kFlight results are asked for at once.
template <int kFlight, typename Stats, typename Value>
__device__ __forceinline__ MergedValue merge_values(int count, Stats stats, Value value) {
  MergedValue merged{{0.f, 0.f, 0.f, 0.f}, {-INFINITY, -INFINITY}, {0.f, 0.f}};
  for (int first = 0; first < count; first += kFlight) {
    float4 v[kFlight];
    float2 m[kFlight], l[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      m[i] = float2{-INFINITY, -INFINITY};
      l[i] = float2{0.f, 0.f};
      v[i] = float4{0.f, 0.f, 0.f, 0.f};
      if (first + i < count) {
        stats(first + i, m[i], l[i]);
        v[i] = value(first + i);
      }
    }
    float2 max = merged.max;
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      max.x = m[i].x > max.x || m[i].x != m[i].x ? m[i].x : max.x;
      max.y = m[i].y > max.y || m[i].y != m[i].y ? m[i].y : max.y;
    }
    const float old0 = merge_weight(merged.max.x, max.x), old1 = merge_weight(merged.max.y, max.y);
    merged.max = max;
    merged.sum = float2{merged.sum.x * old0, merged.sum.y * old1};
    merged.value = float4{merged.value.x * old0, merged.value.y * old1, merged.value.z * old0,
                          merged.value.w * old1};
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const float w0 = merge_weight(m[i].x, max.x), w1 = merge_weight(m[i].y, max.y);
      // An empty result weighs nothing, whatever its values are.
      if (m[i].x != -INFINITY) {
        merged.sum.x += w0 * l[i].x;
        merged.value.x += w0 * v[i].x;
        merged.value.z += w0 * v[i].z;
      }
      if (m[i].y != -INFINITY) {
        merged.sum.y += w1 * l[i].y;
        merged.value.y += w1 * v[i].y;
        merged.value.w += w1 * v[i].w;
      }
    }
  }
  return merged;
}

/// Which part of a result the float4 at `index` is.
template <int kRows>
struct FragmentPlace {
  int channel, column;
  __device__ explicit FragmentPlace(int index) {
    const int thread = index % 128;
    const int tile = index / 128;
    channel = tile / (kRows / 8) * 64 + thread / 32 * 16 + thread % 32 / 4;
    column = tile % (kRows / 8) * 8 + thread % 4 * 2;
  }
};

/// Writes a merged float4; the thread that holds channel 0 also writes the rows' lse.
template <int kRows>
__device__ __forceinline__ void store_merged(const KernelParams& k, const Job& job,
                                             const FragmentPlace<kRows>& place,
                                             const MergedValue& m) {
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int row = place.column + b;
    if (row >= job.num_rows) continue;
    const float sum = b == 0 ? m.sum.x : m.sum.y;
    const float inverse = inverse_sum(sum);
    const std::int64_t to = out_offset(k.op, job, row) + place.channel;
    store_element(k.op, to, (b == 0 ? m.value.x : m.value.y) * inverse);
    store_element(k.op, to + 8, (b == 0 ? m.value.z : m.value.w) * inverse);
    if (place.channel == 0) store_lse(k.op, job, row, b == 0 ? m.max.x : m.max.y, sum);
  }
}

/// Addresses of a job's partial results for one block: its row tile and its slice of each result
/// (all of it without clusters).
template <int kRows>
struct Partials {
  const KernelParams& k;
  int row_tile, split;

  __device__ std::int64_t part(std::int32_t slot) const {
    return static_cast<std::int64_t>(slot) * k.geometry.row_tiles_per_group + row_tile;
  }
  __device__ std::int64_t slice(std::int32_t slot) const {
    return part(slot) * k.geometry.splits_per_group + split;
  }
  __device__ float4* out(std::int32_t slot) const {
    return reinterpret_cast<float4*>(k.partial_out) + part(slot) * (kLatent / 4 * kRows);
  }
  __device__ float* max(std::int32_t slot) const {
    return k.partial_stats + slice(slot) * (2 * kRows);
  }
  __device__ float* sum(std::int32_t slot) const { return max(slot) + kRows; }
};

/// Called by the output warpgroups once the block's slice of the job's partial result is written:
/// the last block to come merges that slice of all of them.
template <int kRows>
__device__ void merge_if_last(const KernelParams& k, const Job& job, const JobWalk& walk,
                              const Partials<kRows>& partials, SharedMemory<kRows>& s) {
  const std::int32_t total = walk.total_units();
  const std::int32_t groups = walk.groups();
  const std::int32_t first = group_of(job.first_unit, total, groups);
  const std::int32_t last = group_of(job.first_unit + job.num_units - 1, total, groups);
  // The first group may have begun with another job; the others begin inside this one.
  const std::int32_t first_slot =
      2 * first + (range_begin(first, total, groups) < job.first_unit ? 1 : 0);
  const auto slot = [&](int piece) { return piece == 0 ? first_slot : 2 * (first + piece); };
  const int pieces = last - first + 1;

  __threadfence();
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  std::uint32_t* counter = k.counters + partials.slice(first_slot);
  if (threadIdx.x == 0) {
    const bool is_last = atomicAdd(counter, 1u) == static_cast<std::uint32_t>(pieces - 1);
    if (is_last) *counter = 0;  // Ready for the next launch.
    s.last_arriver = is_last;
  }
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  if (!s.last_arriver) return;
  __threadfence();

  constexpr int kValues = kLatent / 4 * kRows;
  const int slice = kValues / k.geometry.splits_per_group;
  const int begin = partials.split * slice;
  for (int index = begin + threadIdx.x; index < begin + slice; index += kOutputThreads) {
    const FragmentPlace<kRows> place(index);
    const MergedValue merged = merge_values<4>(
        pieces,
        [&](int i, float2& max, float2& sum) {
          max = __ldcg(reinterpret_cast<const float2*>(partials.max(slot(i)) + place.column));
          sum = __ldcg(reinterpret_cast<const float2*>(partials.sum(slot(i)) + place.column));
        },
        [&](int i) { return __ldcg(partials.out(slot(i)) + index); });
    store_merged(k, job, place, merged);
  }
}

/// The end of a job for a block without cluster merge.
template <typename T, int kRows>
__device__ void finish_alone(const KernelParams& k, const Job& job, const JobWalk& walk,
                             const Partials<kRows>& partials, SharedMemory<kRows>& s,
                             const OutputFragment<kRows>& out) {
  if (job.whole) {
    if (job.num_rows > 0) store_output<T, kRows>(k, job, s, out);
  } else {
    const int thread = threadIdx.x % 128;
    const int first_chunk = threadIdx.x / 128 * kChunksPerOutput;
    float4* to = partials.out(job.slot);
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        to[fragment_index<kRows>(first_chunk + i, j, thread)] =
            float4{out[i][4 * j], out[i][4 * j + 1], out[i][4 * j + 2], out[i][4 * j + 3]};
      }
    }
    for (int row = threadIdx.x; row < kRows; row += kOutputThreads) {
      partials.max(job.slot)[row] = s.message[0][row];
      partials.sum(job.slot)[row] = s.message[1][row];
    }
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.p_empty));
  if (!job.whole) merge_if_last(k, job, walk, partials, s);
}

/// The end of a job for a cluster whose blocks share its keys: each block merges one slice of the
/// blocks' results through distributed shared memory.
template <typename T, int kRows>
__device__ void finish_in_cluster(const KernelParams& k, const Job& job, const JobWalk& walk,
                                  const Partials<kRows>& partials, SharedMemory<kRows>& s,
                                  const OutputFragment<kRows>& out) {
  const int splits = k.geometry.splits_per_group;
  const int thread = threadIdx.x % 128;
  const int first_chunk = threadIdx.x / 128 * kChunksPerOutput;
  ptx::named_barrier(kOutputBarrier, kOutputThreads);  // Both warpgroups have read their chunks.
  auto* own = reinterpret_cast<float4*>(s.ring);
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      own[fragment_index<kRows>(first_chunk + i, j, thread)] =
          float4{out[i][4 * j], out[i][4 * j + 1], out[i][4 * j + 2], out[i][4 * j + 3]};
    }
  }
  ptx::fence_async_proxy();  // The ring's next chunks come after these.
  ptx::cluster_arrive();
  ptx::cluster_wait();

  constexpr int kValues = kLatent / 4 * kRows;
  const int slice = kValues / splits;
  const int begin = partials.split * slice;
  const std::uint32_t values = ptx::shared_address(s.ring);
  const std::uint32_t message = ptx::shared_address(s.message);
  const auto rank_of = [&](int split) {
    return split * k.geometry.row_tiles_per_group + partials.row_tile;
  };
  for (int index = begin + threadIdx.x; index < begin + slice; index += kOutputThreads) {
    const FragmentPlace<kRows> place(index);
    const MergedValue merged = merge_values<8>(
        splits,
        [&](int i, float2& max, float2& sum) {
          const std::uint32_t at = ptx::cluster_address(message + place.column * 4, rank_of(i));
          max = ptx::load_cluster_float2(at);
          sum = ptx::load_cluster_float2(at + kRows * 4);
        },
        [&](int i) {
          return ptx::load_cluster_float4(ptx::cluster_address(values + index * 16, rank_of(i)));
        });
    if (job.whole) {
      store_merged(k, job, place, merged);
    } else {
      partials.out(job.slot)[index] = merged.value;
      // Each slice carries all stats that its merger needs; several threads write the same.
      *reinterpret_cast<float2*>(partials.max(job.slot) + place.column) = merged.max;
      *reinterpret_cast<float2*>(partials.sum(job.slot) + place.column) = merged.sum;
    }
  }
  ptx::cluster_arrive();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.p_empty));
  if (!job.whole) merge_if_last(k, job, walk, partials, s);
  ptx::cluster_wait();
}

// ------------------------------------------------------------------------------------ kernel

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_kernel(const __grid_constant__ KernelParams k,
                      const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<SharedMemory<kRows>*>(shared_bytes);
  constexpr int kSlots = SharedMemory<kRows>::kSlots;

  const int row_tiles = k.geometry.row_tiles_per_group;
  const int splits = k.geometry.splits_per_group;
  const std::int32_t group = blockIdx.x / (row_tiles * splits);
  const int rank = blockIdx.x % (row_tiles * splits);
  const int row_tile = rank % row_tiles;
  const int split = rank / row_tiles;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&map);
    for (int i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), 4);  // The reading warps.
    }
    ptx::mbarrier_init(ptx::shared_address(&s.p_full), 128);
    ptx::mbarrier_init(ptx::shared_address(&s.p_empty), kOutputThreads / 32);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // All above may run while the kernel before still does; nothing that it wrote is read above.
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  JobWalk walk(k, group, kRows, row_tile, split);
  Job job;

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  RingPosition<kSlots> ring;
  std::uint32_t message = 0;
  // Blocks of a cluster meet twice at the end of each job: outputs are there, outputs are read.
  const auto meet_cluster_twice = [&] {
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  };
  if (warp < 4 * kOutputWarpgroups) {
    ptx::take_registers<168>();
    const Partials<kRows> partials{k, row_tile, split};
    OutputFragment<kRows> out;
    while (walk.next(job)) {
      accumulate_tiles<T, kRows>(job, s, ring, message, out);
      if (splits == 1) {
        finish_alone<T, kRows>(k, job, walk, partials, s, out);
      } else {
        finish_in_cluster<T, kRows>(k, job, walk, partials, s, out);
      }
    }
  } else if (warp < 4 * kOutputWarpgroups + 4) {
    ptx::take_registers<136>();
    while (walk.next(job)) {
      load_query<T, kRows>(k, job, s);
      ptx::fence_async_proxy();
      ptx::named_barrier(kScoreBarrier, 128);
      score_tiles<T, kRows>(k, job, s, ring, message);
      if (splits > 1) meet_cluster_twice();
    }
  } else {
    ptx::give_registers<40>();
    const int loader = warp - (4 * kOutputWarpgroups + 4);
    if (loader == 1) clear_unused_rows(k.op, blockIdx.x, gridDim.x);
    // Rows that one block alone reads leave L2 first.
    const std::uint64_t policy = ptx::make_l2_policy(row_tiles == 1 ? ptx::L2Policy::evict_first
                                                                    : ptx::L2Policy::evict_normal);
    while (walk.next(job)) {
      if (loader == 0) load_tiles<kRows>(k, &map, job, walk.request(), s, ring, policy);
      if (splits > 1) meet_cluster_twice();
    }
  }
}

}  // namespace fovea::cuda::mla
