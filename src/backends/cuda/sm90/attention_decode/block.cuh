// What the parts of a decode kernel share: tile sizes, shared memory, a job's rows.
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/arithmetic.cuh"
#include "backends/cuda/sm90/attention_decode/formats.cuh"
#include "backends/cuda/sm90/attention_decode/params.h"
#include "backends/cuda/sm90/ptx/barrier.cuh"
#include "backends/cuda/sm90/ptx/copy.cuh"
#include "backends/cuda/sm90/seen_keys.cuh"
#include "backends/cuda/sm90/split_kv/merge.cuh"
#include "backends/cuda/sm90/split_kv/walk.cuh"
#include "variants/visibility.h"

namespace fovea::cuda::decode {

using split_kv::JobShare;
using split_kv::kKeyTile;

constexpr int kRows = 16;  ///< Query rows (tokens x heads of a key head) of a job.
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = kKeyTile / kWarps;  ///< Keys of a tile that a warp takes: its slice.

/// Keys and values of up to kDim channels; of exactly so many where they are quantised.
template <typename Element, int kDimension, typename HeadsFormat>
struct Width {
  using T = Element;
  using Heads = HeadsFormat;
  static constexpr int kDim = kDimension;
  static constexpr int kBlocksPerMultiprocessor = kDim == 256 ? 1 : 2;
  static constexpr int kPieces = kDim / 8;  ///< Of 16 bytes, of a row of T.
  static constexpr int kCodeBytes = kDim * Heads::kBits / 8;
  static constexpr int kHeadBytes = kCodeBytes + Heads::kScaleBytes;
  /// From a row of codes to the next: an odd number of 16 bytes, so that the 16 bytes of eight rows
  /// that are read at a time lie in different banks.
  static constexpr int kRowBytes = Heads::kQuantized ? kCodeBytes + 16 : kCodeBytes;
  /// Slices on their way, of each warp. Copies of 8 bytes take their place in L1 meanwhile, so
  /// quantised heads leave it some of the memory that it shares.
  static constexpr int kStages =
      Heads::kQuantized ? (kRowBytes > 128 ? 3 : 4) : (kDim == 64 ? 6 : 3);
};

/// Rows [keys][channels] of T; 16-byte piece p of row r lies at p ^ r % 8.
template <typename W>
using Rows = std::uint8_t[kKeys][W::kDim * 2];

/// A warp's keys and values of a tile, as stored; dense ones lie as Rows.
template <typename W>
struct Slice {
  std::uint8_t k[kKeys][W::kRowBytes];
  std::uint8_t v[kKeys][W::kRowBytes];
};

template <typename W>
struct SharedMemory {
  Slice<W> ring[kWarps][W::kStages];
  union {
    std::uint8_t q[kRows][W::kDim * 2];  ///< Of the job, as Rows of tiles.
    float4 merge[2][W::kDim / 8][32];    ///< Outputs of two warps at its end, in fragment order.
  };
  SeenKeys seen[kRows];
  VisibleKeys visible;
  JobShare share;  ///< At work: until its end, registers are for outputs.
  float max[kWarps][kRows];
  float sum[kWarps][kRows];
  bool last_arriver;
};

struct KernelParams {
  DecodeParams op;
  split_kv::ScheduleShape shape;
  const split_kv::GroupRange* ranges;  ///< [num_groups], of every key head.
  std::uint32_t* counters;             ///< [Hk][2 num_groups], zeros.
  float* partial_stats;                ///< [Hk][2 num_groups][2][kRows]: max and sum.
  float4* partial_out;                 ///< [Hk][2 num_groups][kDim / 8][32] in fragments.

  // Neighbouring blocks take the heads of one range: their rows share sectors of memory where heads
  // are no multiple of it.
  __device__ std::int32_t kv_head() const { return blockIdx.x % op.num_kv_heads; }
  __device__ std::int32_t group() const { return blockIdx.x / op.num_kv_heads; }
  /// Of a slot of this block's key head, in the three arrays above.
  __device__ std::int64_t place(std::int32_t slot) const {
    return std::int64_t{kv_head()} * 2 * shape.num_groups + slot;
  }
};

__device__ __forceinline__ int piece_offset(int row, int piece) {
  return (piece ^ row % 8) * 16;
}

/// The rows of a job: which query tokens and heads they are, and which keys they see.
struct JobRows {
  const KernelParams& k;
  std::int32_t query_begin;  ///< Row of q and out of the request's first token.
  std::int32_t first_row, num_rows;
  SequenceExtent extent;

  __device__ JobRows(const KernelParams& k, const JobShare& share)
      : k(k),
        query_begin(share.query_begin),
        extent{.num_queries = share.query_len, .num_keys = share.seq_len} {
    if (k.op.draft_tree != nullptr) extent.tree = k.op.draft_tree + share.query_begin;
    first_row = share.job * kRows;
    num_rows = min(kRows, share.query_len * k.shape.heads - first_row);
  }

  /// Keys before the query tokens'.
  __device__ std::int32_t context() const {
    return static_cast<std::int32_t>(extent.num_keys - extent.num_queries);
  }
  /// Query token of row `row`, of its request.
  __device__ std::int32_t token(std::int32_t row) const {
    return (first_row + row) / k.shape.heads;
  }
  __device__ std::int32_t head(std::int32_t row) const {
    return k.kv_head() * k.shape.heads + (first_row + row) % k.shape.heads;
  }
  /// Rows that do not exist see what the last one does.
  __device__ SeenKeys seen(std::int32_t row) const {
    const std::int32_t query = token(min(row, num_rows - 1));
    const KeyInterval keys = visible_keys(k.op.variant, query, extent);
    return {static_cast<std::int32_t>(keys.begin), static_cast<std::int32_t>(keys.end),
            extent.tree ? visible_drafts(k.op.variant, query, extent) : 0};
  }
};

}  // namespace fovea::cuda::decode
