// A team's outputs over quantised rows: O += V P, the merge of the teams, and their storing.
#pragma once

#include "backends/cuda/sm90/mla_decode/finish.cuh"
#include "backends/cuda/sm90/mla_decode/quantized_memory.cuh"
#include "backends/cuda/sm90/ptx/mma.cuh"

namespace fovea::cuda::mla {

/// M rows g and g + 8 are neighbouring channels.
template <typename Format>
struct QuantizedOrder {
  static constexpr int kStep = 1;
  static constexpr int kFlight = 4;
  static __device__ int channel(int chunk, int warp, int g) {
    return Format::channel(warp, chunk, g);
  }
};

/// O^T of a warp: M tiles of [16 channels, 16 rows].
using TeamOutputs = float[kTeamTiles][kQuantizedRows / 2];

/// Multiplies the columns of `out` by `factor` [16].
__device__ __forceinline__ void scale_outputs(const float* factor, int c, TeamOutputs& out) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float2 f = *reinterpret_cast<const float2*>(&factor[8 * j + 2 * c]);
#pragma unroll
    for (int i = 0; i < kTeamTiles; ++i) {
      out[i][4 * j] *= f.x;
      out[i][4 * j + 1] *= f.y;
      out[i][4 * j + 2] *= f.x;
      out[i][4 * j + 3] *= f.y;
    }
  }
}

/// The same at the end of a job, with the codes' units and offsets taken off.
template <typename Format>
__device__ __forceinline__ void finish_outputs(const float* factor, const float* offset, int c,
                                               TeamOutputs& out) {
#pragma unroll
  for (int e = 0; e < kQuantizedRows / 2; ++e) {
    const int row = e / 4 * 8 + 2 * c + e % 2;
    const float f = factor[row] * (e % 4 < 2 ? 1.f : Format::kSecondUnit);
#pragma unroll
    for (int i = 0; i < kTeamTiles; ++i) out[i][e] = fmaf(out[i][e], f, -offset[row]);
  }
}

/// A thread's operands of O^T [warp's channels, rows] += V^T [channels, 64 keys] P^T [64, rows].
template <typename Format>
struct TeamValues {
  static constexpr int kBases = Format::kNextKey > 0 ? 1 : 2;
  static constexpr int kTilesPerLoad = 2 * Format::kTilesPerWord;
  /// Where the first words of the keys at places 2 c and the next lie in a tile.
  int words[kBases];
  int ratios;  ///< Of the warp's channels and keys 2 c and the next.

  __device__ explicit TeamValues(const TeamPlace& at) {
#pragma unroll
    for (int e = 0; e < kBases; ++e) {
      words[e] = kept_if_room<Format>(Format::key(at.c, e) * Format::kRowBytes +
                                      Format::value_byte(at.warp, at.g));
    }
    ratios = at.warp * Format::kGroups / kTeamWarps * kKeyTile + 2 * at.c;
  }

  __device__ __forceinline__ void add(const TeamPlace& at, const std::uint8_t* raw,
                                      const std::uint8_t* p, const __half* ratio,
                                      TeamOutputs& out) const {
    const std::uint32_t operand = ptx::shared_address(p) + (at.weights ^ at.warp * 32);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      std::uint32_t b[4];
      ptx::load_matrices(b, operand ^ step * 32);
      if constexpr (Format::kGroups > 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto r =
              *reinterpret_cast<const __half2*>(ratio + ratios + step * 16 + i % 2 * 8);
          reinterpret_cast<__half2&>(b[i]) *= r;
        }
      }
#pragma unroll
      for (int load = 0; load < kTeamTiles / kTilesPerLoad; ++load) {
        std::uint32_t word[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int to_key = Format::first_key(step) + i / 2 * Format::kHighKey +
                             (kBases == 1 ? i % 2 * Format::kNextKey : 0);
          load_words<8>(raw + words[i % kBases] + (to_key * Format::kRowBytes + load * 64),
                        word[i]);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const std::uint32_t key[4] = {word[0][n], word[1][n], word[2][n], word[3][n]};
          std::uint32_t a[Format::kTilesPerWord][4];
          Format::value_operands(key, a);
#pragma unroll
          for (int i = 0; i < Format::kTilesPerWord; ++i) {
            float* to = out[load * kTilesPerLoad + n * Format::kTilesPerWord + i];
            ptx::mma<__half>(to, a[i], b[0], b[1]);
            ptx::mma<__half>(to + 4, a[i], b[2], b[3]);
          }
        }
      }
    }
  }
};

/// Adds the teams' outputs up: the first half of the M tiles in team 0, the second in team 1, which
/// store them as two output warpgroups do. Maxima and sums of the job go to the handover's message.
/// Run by all teams once they have published theirs.
template <typename Format>
__device__ __forceinline__ void merge_teams(const KernelParams& k, const TeamPlace& at,
                                            QuantizedMemory<Format>& s, TeamOutputs& out,
                                            OutputFragment<kQuantizedRows>& merged) {
  static_assert(kTeams == 3 && kTeamTiles == 2 * kChunksPerOutput);
  static_assert(sizeof(s.q) >= 8 * kTeamThreads * sizeof(float4));
  ptx::named_barrier(kComputeBarrier, kComputeThreads);
  if (threadIdx.x < kQuantizedRows) {
    const int row = threadIdx.x;
    float max = -INFINITY;
    for (int team = 0; team < kTeams; ++team) {
      float& of_team = s.team_max[team][row];
      if (of_team == kNothing) of_team = -INFINITY;
      max = fmaxf(max, of_team);
    }
    float sum = 0.f;
    for (int team = 0; team < kTeams; ++team) {
      const float weight = split_kv::merge_weight(s.team_max[team][row], max);
      s.factor[team][row] = weight * Format::kUnit * (Format::kKeyScales ? 1.f : k.op.cache_scale);
      float offset = 0.f;
      for (int i = 0; i < kTeamWarps; ++i) {
        sum += weight * s.team_sum[team][i][row];
        if (Format::kLowOffset != 0.f) offset += weight * s.team_offset[team][i][row];
      }
      s.output_offset[team][row] = offset;
    }
    // The maximum passes over a NaN; a merge must not take its row for an empty one.
    s.handover.message[0][row] = isnan(sum) ? sum : max;
    s.handover.message[1][row] = sum;
  }
  ptx::named_barrier(kComputeBarrier, kComputeThreads);
  finish_outputs<Format>(s.factor[at.team], s.output_offset[at.team], at.c, out);
  const bool second = at.team == 1;
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int e = 0; e < kQuantizedRows / 2; ++e) {
      merged[i][e] = second ? out[kChunksPerOutput + i][e] : out[i][e];
      // What the other one of teams 0 and 1 wants, and the first of what team 2 gives.
      if (second) out[kChunksPerOutput + i][e] = out[i][e];
    }
  }
  // Two places in turn, [receiver][2 float4][thread]: one is written again when the other has been
  // passed on.
  auto* const places = reinterpret_cast<float4*>(s.q) + threadIdx.x % kTeamThreads;
#pragma unroll
  for (int turn = 0; turn < 2 * kChunksPerOutput; ++turn) {
    const int i = turn / 2;
    float4* const place = places + turn % 2 * (4 * kTeamThreads);
    const auto give = [&](int receiver, const float* from) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        place[(receiver * 2 + j) * kTeamThreads] =
            float4{from[4 * j], from[4 * j + 1], from[4 * j + 2], from[4 * j + 3]};
      }
    };
    if (turn % 2 == 0) {
      if (at.team < 2) give(1 - at.team, out[kChunksPerOutput + i]);
    } else if (at.team == 2) {
      give(0, out[i]);
      give(1, out[kChunksPerOutput + i]);
    }
    ptx::named_barrier(kComputeBarrier, kComputeThreads);
    if (at.team == 2) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 other = place[(at.team * 2 + j) * kTeamThreads];
      merged[i][4 * j] += other.x;
      merged[i][4 * j + 1] += other.y;
      merged[i][4 * j + 2] += other.z;
      merged[i][4 * j + 3] += other.w;
    }
  }
}

/// Writes normalised outputs straight from the fragments: two neighbouring channels at a time.
template <int kRows, typename Format>
__device__ void store_output(QuantizedOrder<Format>, const KernelParams& k, const Job& job,
                             const Handover<kRows>& s, const OutputFragment<kRows>& out) {
  const int thread = threadIdx.x % 128;
  const int g = thread % 32 / 4;
  const int c = thread % 4;
  const MlaDecodeParams& op = k.op;
  for (int row = threadIdx.x; row < kRows; row += kOutputThreads) {
    store_lse(k, job, row, s.message[0][row], s.message[1][row]);
  }
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int row = 8 * j + 2 * c + b;
      if (row >= job.num_rows) continue;
      const float inverse = inverse_sum(k, job, row, s.message[0][row], s.message[1][row]);
      const std::int64_t to = out_offset(k, job, row);
#pragma unroll
      for (int i = 0; i < kChunksPerOutput; ++i) {
        const int channel = QuantizedOrder<Format>::channel(
            threadIdx.x / 128 * kChunksPerOutput + i, thread / 32, g);
        store_elements<1>(op, to + channel, out[i][4 * j + b] * inverse,
                          out[i][4 * j + 2 + b] * inverse);
      }
    }
  }
}

}  // namespace fovea::cuda::mla
