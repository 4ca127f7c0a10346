// What the kernel over quantised rows keeps in shared memory, and which warp does what.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"
#include "backends/cuda/sm90/mla_decode/row_formats.cuh"
#include "backends/cuda/sm90/mla_decode/visible_keys.cuh"

namespace fovea::cuda::mla {

constexpr int kQuantizedRows = 16;  ///< Query rows of a tile.
/// Three teams of 4 warps take key tiles in turn, each with outputs, maxima and sums of its own;
/// one more warpgroup brings the tiles.
constexpr int kTeams = 3;
constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = 32 * kTeamWarps;
constexpr int kComputeThreads = kTeams * kTeamThreads;
constexpr int kQuantizedThreads = kComputeThreads + 128;
/// Of 128 a thread at the start.
constexpr int kComputeRegisters = 160;
constexpr int kLoadRegisters = 32;
constexpr int kTeamTiles = kLatent / kTeamWarps / 16;  ///< M tiles of a warp's outputs.

/// Named barriers beside kOutputBarrier: all teams, each team.
constexpr int kComputeBarrier = 3;
constexpr int kTeamBarrier = 4;

/// A row of f16 queries: 9 chunks of 64 channels, and 16 bytes so that 8 rows' pieces meet no bank.
constexpr int kQueryStride = kChunks * 128 + 16;
/// Rows of two 8-bit digits of integer queries: 128 channels of all upper and of all lower ones.
constexpr int kDigitsBytes = 2 * kQuantizedRows * 128;

/// How teams take the tiles of a job, in turn: kTiles in a step, but a single one in each of the
/// first few where teams would have unequal shares otherwise.
template <int kTiles>
struct Steps {
  std::int32_t tiles = 0, singles = 0, count = 0;

  Steps() = default;
  __device__ explicit Steps(const Job& job) : tiles(job.tile_end - job.tile_begin) {
    static_assert(kTiles <= 2);
    const std::int32_t rest = tiles % (kTiles * kTeams);
    singles = kTiles == 1 ? 0 : min(rest, kTiles * kTeams - rest);
    count = singles + (tiles - singles) / kTiles;
  }
  __device__ std::int32_t first_tile(std::int32_t step) const {
    return step < singles ? step : singles + (step - singles) * kTiles;
  }
  __device__ int tiles_of(std::int32_t step) const { return step < singles ? 1 : kTiles; }
};

/// Tiles and steps so far: places in the ring, and turns of the teams.
struct Places {
  std::uint32_t tiles = 0, steps = 0;

  template <int kTiles>
  __device__ void add(const Steps<kTiles>& of_job) {
    tiles += of_job.tiles;
    steps += of_job.count;
  }
};

constexpr float kNothing = -1e30f;  ///< A reference maximum before the first visible key.

template <typename Format>
struct QuantizedMemory {
  static constexpr int kTileBytes = kKeyTile * Format::kRowBytes;
  static constexpr int kProbabilityBytes = kQuantizedRows * 128;
  static constexpr int kStepTiles = Format::kStepTiles;
  /// Scales of groups of channels, where a key has several.
  static constexpr int kRatios = Format::kGroups == 1 ? 1 : Format::kGroups * kKeyTile;
  static constexpr int kQueryBytes = Format::kIntegers ? (kChunks + 1) / 2 * kDigitsBytes
                                                       : kQuantizedRows * kQueryStride;
  /// As many tiles as fit in 227 KB beside the rest, 8 at most.
  static constexpr int kRest = kQueryBytes +
                               2 * kTeams * kStepTiles * (kProbabilityBytes + 2 * kRatios) + 4096;
  static constexpr int kFit = (227 * 1024 - kRest) / kTileBytes;
  static constexpr int kSlots = kFit < 8 ? kFit : 8;
  /// Barriers of steps, of which the ring may have as many as tiles. A team meets every phase of
  /// its barriers: one before last would look like the next one.
  static constexpr int kArrivals = (kSlots + kTeams - 1) / kTeams * kTeams;

  /// P^T [16 rows][64 keys], f16, in the 128-byte swizzle. Two steps of each team in turn.
  std::uint8_t p[kTeams][2][kStepTiles][kProbabilityBytes];
  /// Channels in the format's positions: f16 [16 rows][576], or digits [channels / 128][2][16 rows]
  /// [128] in the 128-byte swizzle. At the end of a job outputs pass through it.
  alignas(1024) std::uint8_t q[kQueryBytes];
  alignas(16) std::uint8_t ring[kSlots][kTileBytes];
  __half ratio[kTeams][2][kStepTiles][kRatios];  ///< [group of channels][64 keys]; see key_weight.
  alignas(16) float warp_max[kTeams][4][kQuantizedRows];
  float team_sum[kTeams][4][kQuantizedRows];
  float team_offset[kTeams][4][kQuantizedRows];  ///< Of outputs, where codes have offsets.
  float team_max[kTeams][kQuantizedRows];  ///< References for weights, log2 units.
  float factor[kTeams][kQuantizedRows];  ///< What a team's outputs are multiplied by.
  float output_offset[kTeams][kQuantizedRows];  ///< What is taken off them then.
  float score_scale[kQuantizedRows];     ///< From products with the scaled query row to log2 units.
  std::uint64_t full[kArrivals];  ///< By the step's turn, modulo.
  std::uint64_t empty[kSlots];
  alignas(8) std::uint8_t walk[sizeof(JobWalk)];
  VisibleKeys visible;
  std::int32_t first_common, num_common;  ///< Tiles of keys that all rows see.
  std::int32_t has_job;
  Steps<kStepTiles> steps;  ///< Of the job.
  Places before;            ///< Those of the jobs before.
  SeenKeys seen[kQuantizedRows];
  Handover<kQuantizedRows> handover;

  /// Where tile `tile` of a step lies in the ring. For one that the step lacks, the one before.
  __device__ std::uint32_t slot(std::int32_t step, int tile) const {
    const int of_step = tile < steps.tiles_of(step) ? tile : 0;
    return (before.tiles + steps.first_tile(step) + of_step) % kSlots;
  }
  /// Which half of p and ratio a step of a team takes.
  __device__ int half(std::int32_t step) const { return (before.steps + step) / kTeams % 2; }

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

/// The same, where a step has one tile: with two, registers are too few.
template <typename Format>
__device__ __forceinline__ int kept_if_room(int value) {
  return Format::kStepTiles == 1 ? kept(value) : value;
}

/// A thread's place. A warp of a team takes 16 keys of each tile for S and 128 channels for O.
struct TeamPlace {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int team = threadIdx.x / kTeamThreads;
  const int warp = threadIdx.x / 32 % kTeamWarps;
  /// Of the warp's keys in P; lane l addresses row l % 8 of matrix l / 8 (row block, keys).
  const int weights =
      (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
};

}  // namespace fovea::cuda::mla
