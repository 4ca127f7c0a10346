// A team's scores over quantised rows: S = K Q, softmax, P.
#pragma once

#include "backends/cuda/sm90/mla_decode/quantized_memory.cuh"
#include "backends/cuda/sm90/ptx/mma.cuh"
#include "backends/cuda/sm90/ptx/wgmma.cuh"

namespace fovea::cuda::mla {

/// A row's largest magnitude, NaN if one is.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

/// Queries as f16, each row times a power of two that brings its largest element near 2^14, the
/// rope part as bf16 where the keys' is; or, where codes are integers, as integers of two digits,
/// 256 upper + lower, -128 <= lower < 128, of which the largest of a row is 127 * 256. Rows with a
/// NaN or an infinity have NaN in score_scale then. Run by all teams.
template <typename Format>
__device__ void load_query_scaled(const KernelParams& k, const Job& job,
                                  QuantizedMemory<Format>& s) {
  const int lane = threadIdx.x % 32;
  const MlaDecodeParams& op = k.op;
  if (threadIdx.x < kQuantizedRows) s.seen[threadIdx.x] = seen_keys(k, job, threadIdx.x);
  const bool bf16 = op.query_type == ElementType::bf16;
  // Channels 2 lane and the next of each chunk.
  const auto load = [&](int row, std::uint32_t(&word)[kChunks]) {
    const bool exists = row < job.num_rows;
    const QueryRow r(k, job, exists ? row : 0);
    const std::int64_t t = job.query_begin + std::int64_t{r.token};
    const auto* latent = static_cast<const std::uint32_t*>(op.q_latent) +
                         (t * op.q_latent_token_stride + r.head * op.q_latent_head_stride) / 2;
    const auto* pe = static_cast<const std::uint32_t*>(op.q_pe) +
                     (t * op.q_pe_token_stride + r.head * op.q_pe_head_stride) / 2;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      word[chunk] = !exists ? 0 : __ldg(chunk < 8 ? latent + chunk * 32 + lane : pe + lane);
    }
  };
  constexpr int kWarps = kComputeThreads / 32;
  std::uint32_t next[kChunks];
  load(threadIdx.x / 32, next);
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < kQuantizedRows; row += kWarps) {
    std::uint32_t word[kChunks];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) word[chunk] = next[chunk];
    if (row + kWarps < kQuantizedRows) load(row + kWarps, next);
    float2 value[kChunks];
    float largest = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      value[chunk] = bf16 ? __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(word[chunk]))
                          : __half22float2(reinterpret_cast<const __half2&>(word[chunk]));
      largest = larger_or_nan(largest,
                              larger_or_nan(fabsf(value[chunk].x), fabsf(value[chunk].y)));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      largest = larger_or_nan(largest, __shfl_xor_sync(~0u, largest, step));
    }
    if constexpr (Format::kIntegers) {
      constexpr float kLargest = 127 * 256;
      largest = larger_or_nan(largest, 0x1p-100f);
      const float factor = kLargest / largest;
      if (lane == 0) {
        s.score_scale[row] = largest / kLargest * op.sm_scale * kLog2e * Format::kScoreUnit;
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        std::uint8_t* to = s.q + chunk / 2 * kDigitsBytes + row * 128;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = (chunk % 2 * 64 + Format::position(2 * lane + e)) ^ (row % 8 * 16);
          const int v = __float2int_rn((e == 0 ? value[chunk].x : value[chunk].y) * factor);
          to[at] = static_cast<std::uint8_t>((v + 128) >> 8);
          to[kDigitsBytes / 2 + at] = static_cast<std::uint8_t>(v);
        }
      }
    } else {
      // The exponent of `largest`, kept where both powers of two below are finite.
      const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100);
      const float factor = __uint_as_float((127 + 14 - exponent) << 23);
      if (lane == 0) {
        s.score_scale[row] = __uint_as_float((127 - 14 + exponent) << 23) * op.sm_scale * kLog2e *
                             (Format::kKeyScales ? 1.f : op.cache_scale);
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = chunk < 8 ? Format::latent_position(2 * lane + e)
                                   : Format::rope_position(2 * lane + e);
          const float v = (e == 0 ? value[chunk].x : value[chunk].y) * factor;
          std::uint8_t* to = s.q + row * kQueryStride + chunk * 128 + at * 2;
          if (Format::kBf16Rope && chunk == 8) {
            *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(v);
          } else {
            *reinterpret_cast<__half*>(to) = __float2half_rn(v);
          }
        }
      }
    }
  }
  if constexpr (Format::kIntegers) ptx::fence_async_proxy();
  if (threadIdx.x < kTeams * kQuantizedRows) (&s.team_max[0][0])[threadIdx.x] = kNothing;
}

/// A team's scores and softmax of one job, as one thread keeps them: of two keys of its warp's 16
/// of each tile of a step, at places g and g + 8, and of query rows 2 c, 2 c + 1, 8 + 2 c and
/// 9 + 2 c, [block of 8][2].
/// The sums are over the thread's keys; maxima are the team's, in shared memory.
template <typename Format>
struct TeamScores {
  using Memory = QuantizedMemory<Format>;
  static constexpr int kTiles = Memory::kStepTiles;
  using Tiles = std::uint8_t* [kTiles];
  using Probabilities = std::uint8_t[Memory::kProbabilityBytes];
  using Ratios = __half[Memory::kRatios];
  using Scores = float[2][4];   ///< [block of rows][2 * key + row]
  using Columns = float[2][2];  ///< Of each query row.

  const KernelParams& k;
  Memory& s;
  const TeamPlace& at;
  /// The thread's first key, the second being kHighKey further on, and where the first lies in a
  /// tile.
  const int key0 = Format::first_key(at.warp) + Format::key(at.g / 2, at.g % 2);
  const int row = kept_if_room<Format>(key0 * Format::kRowBytes);
  /// Of queries; lane l addresses row l % 8 of matrix l / 8 (row block, half of a k16 step).
  const std::uint32_t q = kept(ptx::shared_address(s.q) +
                               (at.lane / 16 * 8 + at.lane % 8) * kQueryStride +
                               at.lane / 8 % 2 * 16);
  Columns sum = {};
  Columns offset = {};  ///< Of outputs: what the codes' offsets have added.

  __device__ TeamScores(const KernelParams& k, const TeamPlace& at, Memory& s)
      : k(k), s(s), at(at) {}

  /// Queries' operands on their way: those of kAhead k16 steps.
  static constexpr int kAhead = Format::kGroups == 1 ? 3 : 2;
  using Queries = std::uint32_t[kAhead][4];
  static constexpr int kRopeSteps = kRope / 16;
  static constexpr int kSteps = kRopeSteps + kLatent / 16;

  /// Asks for the queries of step `step`, 0 to kSteps - 1: rope channels come first.
  __device__ __forceinline__ void load_queries(int step, std::uint32_t (&to)[4]) const {
    ptx::load_matrices(to, q + (step < kRopeSteps ? 2 * kLatent + step * 32
                                                  : (step - kRopeSteps) * 32));
  }

  /// S^T of the warp's keys [16] and all rows [16], with the keys' scales, by products of one warp
  /// in f16. The first queries are on their way.
  __device__ __forceinline__ void float_scores(const std::uint8_t* raw, Queries& queries,
                                               Scores& score) const {
    constexpr int kChunks = kLatent / 64;
    constexpr int kChunksOfScale = kChunks / Format::kGroups;
    constexpr int kToSecond = Format::kHighKey * Format::kRowBytes;
    const int latent = row + Format::latent_byte(at.c);
    std::uint32_t word[2][2][Format::kChunkWords];  // Of a chunk and the next.
    const auto load_chunk = [&](int n, int place) {
      Format::load_latent(raw + latent, n, word[place % 2][0]);
      Format::load_latent(raw + latent + kToSecond, n, word[place % 2][1]);
    };
    const auto add_products = [&]<typename T>(T, int step, int place, const std::uint32_t(&a)[4],
                                              Scores& sum) {
      std::uint32_t(&b)[4] = queries[place % kAhead];
      ptx::mma<T>(sum[0], a, b[0], b[1]);
      ptx::mma<T>(sum[1], a, b[2], b[3]);
      if (step + kAhead < kSteps) load_queries(step + kAhead, b);
    };

#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) score[j][e] = 0.f;
    }
    std::uint32_t rope_word[2][2][Format::kRopeWords];  // Of both halves.
    const auto load_rope = [&](int half) {
      const std::uint8_t* from = raw + row + Format::rope_byte(half, at.c);
      Format::load_rope(from, rope_word[half][0]);
      Format::load_rope(from + kToSecond, rope_word[half][1]);
    };
    load_rope(0);
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      if (step == 0) load_rope(1);
      if (step == 2) load_chunk(0, 0);
      std::uint32_t a[4];
      Format::rope_operand(rope_word[step / 2], step % 2, a);
      using Rope = std::conditional_t<Format::kBf16Rope, __nv_bfloat16, __half>;
      add_products(Rope{}, step, step, a, score);
    }
    if constexpr (Format::kKeyScales && !Format::kBf16Rope) {
      const float scale0 = Format::rope_scale(row0(raw)), scale1 = Format::rope_scale(row1(raw));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) score[j][e] *= e < 2 ? scale0 : scale1;
      }
    }
#pragma unroll 1  // Several groups at once would take too many registers.
    for (int n = 0; n < kChunks; n += kChunksOfScale) {
      Scores part = {};
#pragma unroll
      for (int i = 0; i < kChunksOfScale; ++i) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          std::uint32_t a[4];
          Format::score_operand(word[i % 2], step, a);
          if (step == 1 && n + i + 1 < kChunks) load_chunk(n + i + 1, i + 1);
          add_products(__half{}, kRopeSteps + 4 * (n + i) + step, kRopeSteps + 4 * i + step, a,
                       Format::kKeyScales ? part : score);
        }
      }
      if constexpr (Format::kKeyScales) {
        const float scale0 = Format::latent_scale(row0(raw), n / kChunksOfScale);
        const float scale1 = Format::latent_scale(row1(raw), n / kChunksOfScale);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            score[j][e] = fmaf(part[j][e], e < 2 ? scale0 : scale1, score[j][e]);
          }
        }
      }
    }
  }

  /// Where a step's tiles lie. Found more than once, for registers are few in between.
  __device__ __forceinline__ void find_tiles(std::int32_t step, Tiles& raw) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      raw[t] = s.ring[s.slot(kTiles == 1 ? step : kept(step), t)];
    }
  }

  /// S^T of the warp's keys [16] of each tile and all rows [16], with the keys' scales, by products
  /// of the team in integers.
  __device__ __forceinline__ void integer_scores(std::int32_t step, Tiles& raw,
                                                 Scores (&score)[kTiles]) const {
    constexpr int kToSecond = Format::kHighKey * Format::kRowBytes;
    constexpr int kLatentSteps = kLatent / 32, kSteps = (kLatent + kRope) / 32;
    const int first_chunk = row + Format::latent_byte(at.c);
    const std::uint64_t q = ptx::swizzled_operand(ptx::shared_address(s.q));
    std::int32_t sum[kTiles][16];  // With upper digits, then with lower ones.
    std::uint32_t word[Format::kChunksAtOnce][kTiles][2][Format::kChunkWords];
    std::uint32_t a[2][kTiles][4];  // Of a k32 step and the next.
    const auto load_chunk = [&](int n) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const std::uint8_t* from = raw[t] + first_chunk + n * Format::kChunkBytes;
        Format::load_chunk(from, word[n % Format::kChunksAtOnce][t][0]);
        Format::load_chunk(from + kToSecond, word[n % Format::kChunksAtOnce][t][1]);
      }
    };
    const auto end_sums = [&] {
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) ptx::pin(sum[t]);
    };
    const auto value = [&](int t, int e) {
      return static_cast<float>(sum[t][e] * 256 + sum[t][8 + e]);
    };
    load_chunk(0);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      if (n == kLatentSteps) {
        float scale[kTiles][2];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          scale[t][0] = Format::latent_scale(row0(raw[t]), 0);
          scale[t][1] = Format::latent_scale(row1(raw[t]), 0);
        }
        end_sums();
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int e = 0; e < 8; ++e) score[t][e / 4][e % 4] = value(t, e) * scale[t][e % 4 / 2];
        }
        load_chunk(n / 2);
      } else if (n > 1) {
        ptx::wgmma_wait<1>();  // Operands before last are free.
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        Format::score_operand(word[n / 2 % Format::kChunksAtOnce][t], n % 2, a[n % 2][t]);
      }
      if (n % 2 == 1 && n + 1 < kLatentSteps) load_chunk(n / 2 + 1);
      ptx::wgmma_fence();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        ptx::wgmma_s8(sum[t], a[n % 2][t], q + n / 4 * (kDigitsBytes >> 4) + n % 4 * 2,
                      n % kLatentSteps != 0);
      }
      ptx::wgmma_commit();
    }
    find_tiles(step, raw);
    float scale[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      scale[t][0] = Format::rope_scale(row0(raw[t]));
      scale[t][1] = Format::rope_scale(row1(raw[t]));
    }
    end_sums();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& of_key = score[t][e / 4][e % 4];
        of_key = fmaf(value(t, e), scale[t][e % 4 / 2], of_key);
      }
    }
  }
  __device__ __forceinline__ const std::uint8_t* row0(const std::uint8_t* raw) const {
    return raw + row;
  }
  __device__ __forceinline__ const std::uint8_t* row1(const std::uint8_t* raw) const {
    return raw + row + Format::kHighKey * Format::kRowBytes;
  }

  __device__ __forceinline__ void team_barrier() const {
    ptx::named_barrier(kTeamBarrier + at.team, kTeamThreads);
  }

  /// Zeros the warp's keys that no row sees, and those that only some see if they hold a NaN: for
  /// the others 0 * NaN would spoil the output. Rows that see such a key have a NaN in its weight.
  __device__ __forceinline__ void clean_keys(std::uint8_t* raw, std::int32_t first_key) const {
    __syncwarp();  // All lanes have their scores.
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int key = at.warp * 16 + i;
      const std::int32_t position = first_key + key;
      if (position >= s.visible.common_begin && position < s.visible.common_end) continue;
      std::uint8_t* from = raw + key * Format::kRowBytes + at.lane * 16;
      bool clear = position < s.visible.any_begin || position >= s.visible.any_end;
      if (!clear) {
        std::uint32_t word[4];
        load_words<Format::kAlignment>(from, word);
        bool found = false;
        for (const std::uint32_t w : word) {
          constexpr std::uint32_t kMask = Format::kNotFinite * 0x01010101;
          found |= __vcmpeq4(w & kMask, kMask) != 0;
        }
        clear = __any_sync(~0u, found);
      }
      if (clear) {
        auto* piece = reinterpret_cast<uint2*>(from);
        piece[0] = piece[1] = uint2{0, 0};
      }
    }
    ptx::fence_async_proxy();  // A later tile comes to the same place.
  }

  __device__ __forceinline__ void mask(Scores& score, std::int32_t first_key, bool shown) const {
    const Job& job = s.handover.job;
    const bool drafts = shown && has_drafts(k, job, first_key);
    const std::int32_t first_draft = job.seq_len - job.query_len - first_key;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const SeenKeys& seen = s.seen[8 * j + 2 * at.c + b];
        const std::int32_t end = shown ? seen.end : 0;
        const std::int32_t a = first_key + key0, z = a + Format::kHighKey;
        if (a < seen.begin || a >= end) score[j][b] = -INFINITY;
        if (z < seen.begin || z >= end) score[j][2 + b] = -INFINITY;
        if (!drafts) continue;
        const std::uint64_t bits = drafts_of_tile(seen.drafts, first_draft) >> key0;
        if ((bits & 1) == 0) score[j][b] = -INFINITY;
        if ((bits >> Format::kHighKey & 1) == 0) score[j][2 + b] = -INFINITY;
      }
    }
  }

  /// What a key's scales do to its weight, which is kept as 2^(score + log - max), log that of the
  /// largest scale, so that P, in f16, stays in range whatever the scales are; the weight without
  /// scales is that times `inverse`. Where groups of channels have scales of their own, that of a
  /// group times `inverse`, at most 1, multiplies weights on their way into O.
  struct KeyWeight {
    float log, inverse;
  };
  static __device__ __forceinline__ KeyWeight key_weight(const std::uint8_t* row) {
    if constexpr (Format::kKeyScales) {
      float largest = Format::latent_scale(row, 0);
#pragma unroll
      for (int i = 1; i < Format::kGroups; ++i) {
        largest = fmaxf(largest, Format::latent_scale(row, i));
      }
      float log;
      asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(largest));
      log = fmaxf(log, -100.f);  // A scale of 0 is taken as 2^-100.
      return {log, exp2_approx(-log)};
    } else {
      return {0.f, 1.f};  // Outputs are multiplied at the end.
    }
  }
  /// Ratios of groups to the largest scale, to shared memory: lane c has group c of its keys.
  __device__ __forceinline__ void store_ratios(const std::uint8_t* raw, const KeyWeight& w0,
                                               const KeyWeight& w1, bool all_visible,
                                               __half* to) const {
    static_assert(Format::kGroups == 4);
    const auto ratio = [&](const std::uint8_t* row, const KeyWeight& w) {
      const float r = Format::latent_scale(row, at.c) * w.inverse;
      // Rows that see a key with a NaN have it in its weight, for the others 0 * NaN would spoil O.
      return __float2half_rn(all_visible || fabsf(r) < 4.f ? r : 1.f);
    };
    to[at.c * kKeyTile + at.warp * 16 + at.g] = ratio(row0(raw), w0);
    to[at.c * kKeyTile + at.warp * 16 + at.g + 8] = ratio(row1(raw), w1);
  }

  /// P of the thread's keys and rows against the reference maxima, to shared memory, and `rounded`
  /// as it is there. Whether a score is so far above them that they must be raised first.
  __device__ __forceinline__ bool weigh(const Scores (&score)[kTiles], const Columns& max,
                                        Probabilities* to, Scores (&p)[kTiles],
                                        std::uint32_t (&rounded)[kTiles][4]) const {
    float highest = -INFINITY;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float above = score[t][j][e] - max[j][e % 2];
          highest = fmaxf(highest, above);
          p[t][j][e] = exp2_approx(above);
        }
        rounded[t][2 * j] = pack<__half>(p[t][j][0], p[t][j][1]);
        rounded[t][2 * j + 1] = pack<__half>(p[t][j][2], p[t][j][3]);
      }
      ptx::store_matrices_transposed(ptx::shared_address(to[t]) + at.weights, rounded[t][0],
                                     rounded[t][1], rounded[t][2], rounded[t][3]);
    }
    return highest > kMaxLag;
  }

  /// Makes the true maxima the reference where that is far below; the team's outputs so far are to
  /// be multiplied by s.factor.
  __device__ __forceinline__ void raise_maxima(const Scores (&score)[kTiles], Columns& max) {
    Columns highest;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        highest[j][b] = -INFINITY;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          highest[j][b] = fmaxf(highest[j][b], fmaxf(score[t][j][b], score[t][j][2 + b]));
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          highest[j][b] = fmaxf(highest[j][b], __shfl_xor_sync(~0u, highest[j][b], step));
        }
      }
      if (at.g == 0) {
        *reinterpret_cast<float2*>(&s.warp_max[at.team][at.warp][8 * j + 2 * at.c]) =
            float2{highest[j][0], highest[j][1]};
      }
    }
    team_barrier();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float factor[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        for (int i = 0; i < kTeamWarps; ++i) {
          highest[j][b] = fmaxf(highest[j][b], s.warp_max[at.team][i][8 * j + 2 * at.c + b]);
        }
        const bool keep = highest[j][b] <= max[j][b] + kMaxLag;
        factor[b] = keep ? 1.f : exp2_approx(max[j][b] - highest[j][b]);
        if (!keep) max[j][b] = highest[j][b];
        sum[j][b] *= factor[b];
        offset[j][b] *= factor[b];
      }
      if (at.warp == 0 && at.g == 0) {
        const int column = 8 * j + 2 * at.c;
        *reinterpret_cast<float2*>(&s.factor[at.team][column]) = float2{factor[0], factor[1]};
        *reinterpret_cast<float2*>(&s.team_max[at.team][column]) = float2{max[j][0], max[j][1]};
      }
    }
  }

  /// S, softmax and P of the tiles `raw` of a step, with the first queries on their way. Where it
  /// has fewer than there are places, the last one weighs nothing. Afterwards, whether outputs are
  /// to be multiplied by s.factor first.
  __device__ __forceinline__ bool step(std::int32_t step, Queries& queries) {
    Tiles raw;
    find_tiles(step, raw);
    Scores score[kTiles];
    if constexpr (Format::kIntegers) {
      integer_scores(step, raw, score);
    } else {
      float_scores(raw[0], queries, score[0]);
    }
    const int tiles = s.steps.tiles_of(step);
    const std::int32_t first_tile = s.handover.job.tile_begin + s.steps.first_tile(step);
    Probabilities* const to = s.p[at.team][s.half(step)];
    Ratios* const ratios = s.ratio[at.team][s.half(step)];
    KeyWeight w0[kTiles], w1[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      w0[t] = key_weight(row0(raw[t])), w1[t] = key_weight(row1(raw[t]));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 units = *reinterpret_cast<const float2*>(s.score_scale + 8 * j + 2 * at.c);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          score[t][j][e] = fmaf(score[t][j][e], e % 2 == 0 ? units.x : units.y,
                                e < 2 ? w0[t].log : w1[t].log);
        }
      }
      const std::int32_t tile = first_tile + t;
      const auto common = static_cast<std::uint32_t>(tile - s.first_common);
      const bool shown = t == 0 || t < tiles;
      const bool all_visible = shown && common < static_cast<std::uint32_t>(s.num_common);
      if constexpr (Format::kGroups > 1) {
        store_ratios(raw[t], w0[t], w1[t], all_visible, ratios[t]);
      }
      if (!all_visible) {
        if constexpr (Format::kNotFinite != 0) {
          if (shown) clean_keys(raw[t], tile * kKeyTile);
        }
        mask(score[t], tile * kKeyTile, shown);
      }
    }
    Scores p[kTiles];
    std::uint32_t rounded[kTiles][4];
    Columns max;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* of_team = &s.team_max[at.team][8 * j + 2 * at.c];
      const float2 pair = *reinterpret_cast<const float2*>(of_team);
      max[j][0] = pair.x, max[j][1] = pair.y;
    }
    const bool far = weigh(score, max, to, p, rounded);
    const bool raised = ptx::named_barrier_any(kTeamBarrier + at.team, kTeamThreads, far);
    if (raised) {
      raise_maxima(score, max);
      weigh(score, max, to, p, rounded);
      team_barrier();
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          sum[j][b] = fmaf(p[t][j][b], w0[t].inverse, sum[j][b]);
          sum[j][b] = fmaf(p[t][j][2 + b], w1[t].inverse, sum[j][b]);
        }
        if constexpr (Format::kLowOffset != 0.f) {
          const auto add = [&](std::uint32_t of_key, float codes_offset) {
            const float2 weight = __half22float2(reinterpret_cast<const __half2&>(of_key));
            offset[j][0] = fmaf(weight.x, codes_offset, offset[j][0]);
            offset[j][1] = fmaf(weight.y, codes_offset, offset[j][1]);
          };
          add(rounded[t][2 * j], Format::kLowOffset);
          add(rounded[t][2 * j + 1], Format::kHighOffset);
        }
      }
    }
    return raised;
  }

  /// Sums of the job, for whoever merges the teams' results.
  __device__ __forceinline__ void publish() {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = 8 * j + 2 * at.c;
      publish_sums(sum[j], &s.team_sum[at.team][at.warp][column]);
      if constexpr (Format::kLowOffset != 0.f) {
        publish_sums(offset[j], &s.team_offset[at.team][at.warp][column]);
      }
    }
  }
  __device__ __forceinline__ void publish_sums(const float (&of_thread)[2], float* to) const {
    float a = of_thread[0], b = of_thread[1];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      a += __shfl_xor_sync(~0u, a, step);
      b += __shfl_xor_sync(~0u, b, step);
    }
    if (at.g == 0) *reinterpret_cast<float2*>(to) = float2{a, b};
  }
};

}  // namespace fovea::cuda::mla
