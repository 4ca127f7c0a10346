// What the kernel over quantised rows keeps in shared memory, and which warp does what.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"
#include "backends/cuda/sm90/mla_decode/row_formats.cuh"
#include "backends/cuda/sm90/mla_decode/visible_keys.cuh"

namespace fovea::cuda::mla {

constexpr int kQuantizedRows = 16;  ///< Query rows of a tile.
/// Two teams of 8 warps take key tiles in turn, each with outputs, maxima and sums of its own; one
/// more warpgroup brings the tiles.
constexpr int kTeams = 2;
constexpr int kTeamWarps = 8;
constexpr int kTeamThreads = 32 * kTeamWarps;
static_assert(kTeamThreads == kOutputThreads);  // A team stores results as dense kernels do.
constexpr int kComputeThreads = kTeams * kTeamThreads;
constexpr int kQuantizedThreads = kComputeThreads + 128;
/// Of 96 a thread at the start.
constexpr int kComputeRegisters = 112;
constexpr int kLoadRegisters = 32;

/// Named barriers beside kOutputBarrier: all teams, each team, each pair of warps.
constexpr int kComputeBarrier = 3;
constexpr int kTeamBarrier = 4;
constexpr int kPairBarrier = kTeamBarrier + kTeams;
static_assert(kPairBarrier + kComputeThreads / 64 <= 16);

/// A row of queries: 9 chunks of 64 channels, and 16 bytes so that 8 rows' pieces meet no bank.
constexpr int kQueryStride = kChunks * 128 + 16;

template <typename Format>
struct QuantizedMemory {
  static constexpr int kTileBytes = kKeyTile * Format::kRowBytes;
  static constexpr int kProbabilityBytes = Format::kGroups * kQuantizedRows * 128;
  /// As many tiles as fit in 227 KB beside the rest, 8 at most. A team must meet every turn of its
  /// slots: a barrier's phase before last looks like its next one.
  static constexpr int kRest = kQuantizedRows * kQueryStride + 2 * kTeams * kProbabilityBytes +
                               16 * kComputeThreads + 4096;
  static constexpr int kFit = (227 * 1024 - kRest) / kTileBytes;
  static constexpr int kSlots = (kFit < 8 ? kFit : 8) / kTeams * kTeams;

  /// P^T [group of channels][16 rows][64 keys], f16, times the group's scale, in the 128-byte
  /// swizzle. Two of each team in turn. At the end of a job results of a team pass through it.
  std::uint8_t p[kTeams][2][kProbabilityBytes];
  std::uint8_t q[kQuantizedRows * kQueryStride];  ///< f16, channels in the format's positions.
  alignas(16) std::uint8_t ring[kSlots][kTileBytes];
  float4 partial[kComputeThreads];  ///< Scores on their way to the other warp of a pair.
  float warp_max[kTeams][4][kQuantizedRows];
  float team_sum[kTeams][4][kQuantizedRows];
  float team_offset[kTeams][4][kQuantizedRows];  ///< Of outputs, where codes have offsets.
  float team_max[kTeams][kQuantizedRows];
  float factor[kTeams][kQuantizedRows];  ///< What a team's outputs are multiplied by.
  float output_offset[kTeams][kQuantizedRows];  ///< What is taken off them then.
  float offset[2][kQuantizedRows];       ///< Of scores: of latent and rope channels, to be scaled.
  float score_scale[kQuantizedRows];     ///< From products with the scaled query row to log2 units.
  std::uint64_t full[kSlots];
  std::uint64_t empty[kSlots];
  alignas(8) std::uint8_t walk[sizeof(JobWalk)];
  VisibleKeys visible;
  std::int32_t first_common, num_common;  ///< Tiles of keys that all rows see.
  std::int32_t has_job;
  std::uint32_t tiles_before;  ///< Of the jobs before: places in the ring.
  std::uint8_t query_of_row[kQuantizedRows];
  Handover<kQuantizedRows> handover;

  __device__ void set_visible(const VisibleKeys& v) {
    visible = v;
    first_common = (max(v.common_begin, 0) + kKeyTile - 1) / kKeyTile;
    num_common = max(0, v.common_end / kKeyTile - first_common);
  }
};

/// Keeps the compiler from computing `value` again wherever it is used.
__device__ __forceinline__ int kept(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// A thread's place. The two warps of a pair, `half` 0 and 1, take the same 16 keys of a tile for
/// S: half of the channels each, then half of the rows.
struct TeamPlace {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int team = threadIdx.x / kTeamThreads;
  const int warp = threadIdx.x / 32 % kTeamWarps;
  const int keys = warp % 4;  ///< Its 16 of the 64.
  const int half = warp / 4;
  const int column = half * 8 + 2 * c;  ///< Of the rows, the thread has this and the next.
};

}  // namespace fovea::cuda::mla
