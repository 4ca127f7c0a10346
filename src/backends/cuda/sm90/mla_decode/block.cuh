// What the roles of a block share: tile sizes, shared memory, the walk over jobs, small helpers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/sm90/arithmetic.cuh"
#include "backends/cuda/sm90/mla_decode/params.h"
#include "backends/cuda/sm90/ptx/barrier.cuh"
#include "backends/cuda/sm90/ptx/copy.cuh"
#include "backends/cuda/sm90/ptx/wgmma.cuh"
#include "backends/cuda/sm90/seen_keys.cuh"
#include "backends/cuda/sm90/split_kv/merge.cuh"
#include "backends/cuda/sm90/split_kv/rendezvous.cuh"
#include "backends/cuda/sm90/split_kv/walk.cuh"
#include "core/divisor.h"

namespace fovea::cuda::mla {

using split_kv::GroupRange;
using split_kv::JobPieces;
using split_kv::kKeyTile;  ///< M of a warpgroup product: keys stand on the M side.

constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kChunks = (kLatent + kRope) / 64;  ///< A tile travels as 9 chunks [64 keys, 64 ch].
constexpr int kChunkBytes = kKeyTile * 64 * 2;
constexpr int kOutputWarpgroups = 2;
constexpr int kOutputThreads = kOutputWarpgroups * 128;
constexpr int kChunksPerOutput = kLatent / 64 / kOutputWarpgroups;
constexpr int kThreads = 512;     ///< Two output warpgroups, one for scores, one that loads.
constexpr int kScoreBarrier = 1;  ///< Named barriers; 0 is the whole block's.
constexpr int kOutputBarrier = 2;
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

/// What a block does for one job of its group.
struct Job {
  std::int32_t seq_len, query_begin, query_len;
  std::int32_t first_row;              ///< Of the block's row tile, among the request's rows.
  std::int32_t num_rows;               ///< Rows of the tile that exist; may be 0.
  std::int32_t tile_begin, tile_end;   ///< Key tiles of this block.
  std::int32_t first_unit, num_units;  ///< Of the whole job.
  bool whole;                          ///< The group covers all keys of the job.
  bool last;                           ///< The group has no further job.
  std::int32_t slot;                   ///< Of the partial result, otherwise.
};

/// Where the partial results of a job that several groups share lie, of one row tile.
struct Pieces {
  std::int32_t count;
  std::int32_t own, first;   ///< Places of the block's result, and of the first one.
  std::int32_t begin, step;  ///< Result i > 0 lies at begin + i * step.

  Pieces() = default;
  __device__ Pieces(const JobPieces& job, std::int32_t slot, std::int32_t row_tile,
                    std::int32_t row_tiles)
      : count(job.count),
        own(slot * row_tiles + row_tile),
        first(job.first_slot * row_tiles + row_tile),
        begin(2 * job.first_group * row_tiles + row_tile),
        step(2 * row_tiles) {}

  __device__ std::int32_t place(std::int32_t i) const { return i == 0 ? first : begin + i * step; }
};

/// The schedule's view of a launch.
__host__ __device__ inline split_kv::ScheduleShape schedule_shape(const MlaDecodeParams& op,
                                                                  const MlaDecodeGeometry& g) {
  return {.num_groups = g.num_groups,
          .heads = op.num_heads,
          .rows_per_job = g.rows * g.row_tiles_per_group,
          .window_left = static_cast<std::int32_t>(op.variant.window_left),
          .attention_chunk = 0};
}

struct KernelParams {
  MlaDecodeParams op;
  MlaDecodeGeometry geometry;
  split_kv::ScheduleShape shape;
  Divisor heads, block_size;
  std::int32_t box_rows;      ///< Keys that one copy brings: a power of two.
  bool bulk_rows;             ///< Quantised rows can come by bulk copies.
  const GroupRange* ranges;   ///< [num_groups]
  std::uint64_t* rendezvous;  ///< [2 num_groups][row_tiles_per_group]
  float4* partial_stats;      ///< [rows / 2][places]; a place is an element of the above.
  float4* partial_out;        ///< [places][512 * rows / 4] in the order of FragmentPlace.
};

/// Walks the jobs of a group; every role of a block walks the same list.
class JobWalk {
 public:
  __device__ JobWalk(const KernelParams& k, std::int32_t rows)
      : k_(k),
        row_tile_(blockIdx.x & (k.geometry.row_tiles_per_group - 1)),
        range_(k.shape, k.ranges, blockIdx.x >> (k.geometry.row_tiles_per_group - 1),
               k.op.query_start_loc, k.op.seq_lens),
        rows_(rows) {}

  __device__ bool next(Job& job) {
    split_kv::JobShare share;
    if (!range_.next(share)) return false;
    request_ = share.request;
    job.seq_len = share.seq_len;
    job.query_begin = share.query_begin;
    job.query_len = share.query_len;
    job.first_row = (share.job * k_.geometry.row_tiles_per_group + row_tile_) * rows_;
    job.num_rows = max(0, min(rows_, share.query_len * k_.op.num_heads - job.first_row));
    const bool empty = share.seq_len <= 0 || job.num_rows == 0;
    job.tile_begin = empty ? 0 : share.first_tile;
    job.tile_end = empty ? 0 : share.first_tile + share.tiles;
    job.first_unit = share.first_unit;
    job.num_units = share.num_units;
    job.whole = share.whole;
    job.last = share.last;
    job.slot = share.slot;
    return true;
  }

  __device__ std::int32_t request() const { return request_; }
  /// Of the job that next() gave last.
  __device__ Pieces pieces(const Job& job) const {
    return {range_.pieces(job.slot, job.first_unit, job.num_units), job.slot, row_tile_,
            k_.geometry.row_tiles_per_group};
  }

 private:
  const KernelParams& k_;
  std::int32_t row_tile_;  ///< Of one or two.
  split_kv::RangeWalk range_;
  std::int32_t rows_;
  std::int32_t request_;
};

/// What the score warpgroup hands to the output warpgroups beside P, and what these need at the end
/// of a job.
template <int kRows>
struct Handover {
  float message[2][kRows];  ///< With P: [0] factors of the output. At the end: max (log2) and sum.
  std::uint64_t p_full;
  std::uint64_t p_empty;
  Job job;                  ///< Of the output warpgroups, whose registers are full.
  Pieces pieces;            ///< Of that job, unless the group has all of it.
  std::int32_t rescale;     ///< Some factor of the message is not 1.
  split_kv::MergeShare share;  ///< Of the merge of that job.

  /// Run by one thread when a job begins: there is time for divisions then.
  __device__ void begin(const Job& next, const JobWalk& walk) {
    job = next;
    if (!next.whole) pieces = walk.pieces(next);
  }

  /// Run by each output thread: P and the message have been read.
  __device__ void release() { ptx::mbarrier_arrive(ptx::shared_address(&p_empty)); }

  /// Run by one thread.
  __device__ void init(int score_threads) {
    ptx::mbarrier_init(ptx::shared_address(&p_full), score_threads);
    ptx::mbarrier_init(ptx::shared_address(&p_empty), kOutputThreads);
  }
};

/// Shared memory of one block. Operand tiles come first: they are 1024-byte aligned.
template <int kRows>
struct SharedMemory {
  /// As many chunks as fit in 227 KB beside the rest.
  static constexpr int kSlots = kRows == 32 ? 23 : 25;

  std::uint8_t ring[kSlots][kChunkBytes];  ///< Chunks on their way.
  std::uint8_t q[kChunks][kRows * 128];
  std::uint8_t p[kRows * 128];  ///< P^T [rows][64 keys]
  float warp_max[2][4][kRows];
  std::uint64_t full[kSlots];
  std::uint64_t empty[kSlots];
  SeenKeys seen[kRows];
  Handover<kRows> handover;

  /// Run by all threads; each warp has a few of the barriers.
  __device__ void init() {
    if (threadIdx.x % 32 != 0) return;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < kSlots; i += kThreads / 32) {
      ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&empty[i]), 4);  // The reading warps.
    }
    if (threadIdx.x == 0) handover.init(128);
    ptx::mbarrier_init_fence();
  }
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
  /// Of a chunk of the tile that begins here.
  __device__ RingPosition chunk(int position) const {
    if constexpr (kSlots % kChunks == 0) {
      return {slot + position, parity};  // A ring of whole tiles: none wraps.
    } else {
      return plus(position);
    }
  }
  __device__ RingPosition plus(int n) const {
    RingPosition moved = *this;
    moved.advance(n);
    return moved;
  }
};

/// Query token, among its request's, and head of a row of the tile.
struct QueryRow {
  std::uint32_t token, head;
  __device__ __forceinline__ QueryRow(const KernelParams& k, const Job& job, std::int32_t row)
      : token(k.heads.quotient(job.first_row + row)),
        head(job.first_row + row - token * k.op.num_heads) {}
};

__device__ __forceinline__ std::int64_t out_offset(const KernelParams& k, const Job& job,
                                                   std::int32_t row) {
  const QueryRow r(k, job, row);
  return (job.query_begin + std::int64_t{r.token}) * k.op.out_token_stride +
         r.head * k.op.out_head_stride;
}

__device__ __forceinline__ void store_element(const MlaDecodeParams& op, std::int64_t offset,
                                              float value) {
  if (op.out_type == ElementType::f32) {
    static_cast<float*>(op.out)[offset] = value;
    return;
  }
  const std::uint32_t bits = op.out_type == ElementType::bf16 ? pack<__nv_bfloat16>(value, 0.f)
                                                              : pack<__half>(value, 0.f);
  static_cast<std::uint16_t*>(op.out)[offset] = static_cast<std::uint16_t>(bits);
}

/// Two values, kStep elements apart. One store where they are 16-bit neighbours, at an even offset.
template <int kStep>
__device__ __forceinline__ void store_elements(const MlaDecodeParams& op, std::int64_t offset,
                                               float first, float second) {
  if (kStep > 1 || op.out_type == ElementType::f32) {
    store_element(op, offset, first);
    store_element(op, offset + kStep, second);
    return;
  }
  *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(op.out) + offset) =
      op.out_type == ElementType::bf16 ? pack<__nv_bfloat16>(first, second)
                                       : pack<__half>(first, second);
}

/// `max` in log2 units and `sum` relative to it; sum 0 is a row that sees nothing.
__device__ __forceinline__ void store_lse(const KernelParams& k, const Job& job, std::int32_t row,
                                          float max, float sum) {
  if (k.op.lse == nullptr || row >= job.num_rows) return;
  const QueryRow r(k, job, row);
  k.op.lse[r.head * k.op.lse_head_stride +
           (job.query_begin + std::int64_t{r.token}) * k.op.lse_token_stride] =
      sum == 0.f ? -INFINITY : (max + log2f(sum)) * kLn2;
}

/// What a row's output is multiplied by at the last merge: one over the sum, in which the head's
/// sink joins here and only here. A row that sees nothing comes out as zeros.
__device__ __forceinline__ float inverse_sum(const KernelParams& k, const Job& job,
                                             std::int32_t row, float max, float sum) {
  if (sum == 0.f) return 0.f;
  if (k.op.sinks != nullptr && row < job.num_rows) {
    sum += exp2_approx(__ldg(k.op.sinks + QueryRow(k, job, row).head) * kLog2e - max);
  }
  return 1.f / sum;
}

}  // namespace fovea::cuda::mla
