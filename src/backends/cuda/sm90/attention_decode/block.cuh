// What the parts of a decode kernel share: tile sizes, shared memory, a job's rows.
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/arithmetic.cuh"
#include "backends/cuda/sm90/attention_decode/params.h"
#include "backends/cuda/sm90/ptx/barrier.cuh"
#include "backends/cuda/sm90/ptx/copy.cuh"
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

/// Keys and values of up to kDim channels.
template <typename Element, int kDimension>
struct Width {
  using T = Element;
  static constexpr int kDim = kDimension;
  static constexpr int kBlocksPerMultiprocessor = kDim == 256 ? 1 : 2;
  /// Slices on their way, of each warp: 192 KB on a multiprocessor.
  static constexpr int kStages = kDim == 64 ? 6 : 3;
  static constexpr int kPieces = kDim / 8;  ///< Of 16 bytes, of a row.
};

/// Rows [keys][channels] of a slice; 16-byte piece p of row r lies at p ^ r % 8.
template <typename W>
struct Slice {
  std::uint8_t k[kKeys][W::kDim * 2];
  std::uint8_t v[kKeys][W::kDim * 2];
};

template <typename W>
struct SharedMemory {
  Slice<W> ring[kWarps][W::kStages];
  union {
    std::uint8_t q[kRows][W::kDim * 2];  ///< Of the job, as rows of a slice.
    float4 merge[2][W::kDim / 8][32];    ///< Outputs of two warps at its end, in fragment order.
  };
  float max[kWarps][kRows];
  float sum[kWarps][kRows];
  bool last_arriver;
};

struct KernelParams {
  DecodeParams op;
  split_kv::ScheduleShape shape;
  const split_kv::GroupRange* ranges;  ///< [num_groups]
  std::uint32_t* counters;             ///< [2 num_groups], zeros.
  float* partial_stats;                ///< [2 num_groups][2][kRows]: max and sum.
  float4* partial_out;                 ///< [2 num_groups][kDim / 8][32] in fragments.
};

__device__ __forceinline__ int piece_offset(int row, int piece) {
  return (piece ^ row % 8) * 16;
}

/// The rows of a job: which query tokens and heads they are, and which keys they see.
struct JobRows {
  const KernelParams& k;
  std::int32_t query_begin;        ///< Row of q and out of the request's first token.
  std::int32_t kv_head, first_row;
  std::int32_t num_rows;
  SequenceExtent extent;

  __device__ JobRows(const KernelParams& k, const JobShare& share)
      : k(k),
        query_begin(share.query_begin),
        extent{.num_queries = share.query_len, .num_keys = share.seq_len} {
    const std::int32_t jobs_of_head = k.shape.row_jobs(share.query_len);
    kv_head = share.job / jobs_of_head;
    first_row = share.job % jobs_of_head * kRows;
    num_rows = min(kRows, share.query_len * k.shape.heads - first_row);
  }

  /// Query token of row `row`, of its request.
  __device__ std::int32_t token(std::int32_t row) const {
    return (first_row + row) / k.shape.heads;
  }
  __device__ std::int32_t head(std::int32_t row) const {
    return kv_head * k.shape.heads + (first_row + row) % k.shape.heads;
  }
  __device__ KeyInterval visible(std::int32_t row) const {
    return visible_keys(k.op.variant, token(min(row, num_rows - 1)), extent);
  }
  __device__ QueryInterval tokens() const { return {token(0), token(num_rows - 1) + 1}; }
};

}  // namespace fovea::cuda::decode
