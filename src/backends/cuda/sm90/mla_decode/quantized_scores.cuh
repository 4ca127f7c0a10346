// A team's scores over quantised rows: S = K Q, softmax, P.
#pragma once

#include "backends/cuda/sm90/mla_decode/quantized_memory.cuh"
#include "backends/cuda/sm90/ptx/mma.cuh"

namespace fovea::cuda::mla {

/// Queries as f16, each row times a power of two that brings its largest element near 2^14; the
/// rope part as bf16 where the keys' is. Run by all teams.
template <typename Format>
__device__ void load_query_scaled(const KernelParams& k, const Job& job,
                                  QuantizedMemory<Format>& s) {
  const int lane = threadIdx.x % 32;
  const MlaDecodeParams& op = k.op;
  const auto heads = static_cast<std::uint32_t>(op.num_heads);
  if (threadIdx.x < kQuantizedRows) {
    const std::uint32_t first = job.first_row, row = threadIdx.x;
    s.query_of_row[row] = static_cast<std::uint8_t>((first + row) / heads - first / heads);
  }
  const bool bf16 = op.query_type == ElementType::bf16;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < kQuantizedRows; row += kComputeThreads / 32) {
    const bool exists = row < job.num_rows;
    const std::uint32_t r = job.first_row + (exists ? row : 0);
    const std::uint32_t token = r / heads, head = r - token * heads;
    const std::int64_t t = job.query_begin + static_cast<std::int64_t>(token);
    const auto* latent = static_cast<const std::uint32_t*>(op.q_latent) +
                         (t * op.q_latent_token_stride + head * op.q_latent_head_stride) / 2;
    const auto* pe = static_cast<const std::uint32_t*>(op.q_pe) +
                     (t * op.q_pe_token_stride + head * op.q_pe_head_stride) / 2;
    std::uint32_t word[kChunks];  // Channels 2 lane and the next of each chunk.
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      word[chunk] = !exists ? 0 : __ldg(chunk < 8 ? latent + chunk * 32 + lane : pe + lane);
    }
    float2 value[kChunks];
    float largest = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      value[chunk] = bf16 ? __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(word[chunk]))
                          : __half22float2(reinterpret_cast<const __half2&>(word[chunk]));
      largest = fmaxf(largest, fmaxf(fabsf(value[chunk].x), fabsf(value[chunk].y)));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    // The exponent of `largest`, kept where both powers of two below are finite.
    const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100);
    const float factor = __uint_as_float((127 + 14 - exponent) << 23);
    if (lane == 0) {
      s.score_scale[row] = __uint_as_float((127 - 14 + exponent) << 23) * op.sm_scale * kLog2e *
                           Format::kUnit * (Format::kKeyScales ? 1.f : op.cache_scale);
    }
    float sum[2] = {0.f, 0.f};  // Of latent and rope channels.
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = chunk < 8 ? Format::latent_position(2 * lane + e)
                                 : Format::rope_position(2 * lane + e);
        const float of_channel = Format::query_factor(e);
        const float v = (e == 0 ? value[chunk].x : value[chunk].y) * (factor * of_channel);
        std::uint8_t* to = s.q + row * kQueryStride + chunk * 128 + at * 2;
        if (Format::kBf16Rope && chunk == 8) {
          *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(v);
        } else {
          const __half rounded = __float2half_rn(v);
          *reinterpret_cast<__half*>(to) = rounded;
          sum[chunk / 8] += __half2float(rounded) / of_channel;
        }
      }
    }
    if constexpr (Format::kCodeOffset != 0.f) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          sum[part] += __shfl_xor_sync(~0u, sum[part], step);
        }
        constexpr float kOffset = -Format::kCodeOffset / Format::kUnit;
        if (lane == 0) s.offset[part][row] = sum[part] * kOffset;
      }
    }
  }
}

/// A team's scores and softmax of one job, as one thread keeps them. Maxima are of the team; the
/// sums are over the thread's keys.
template <typename Format>
struct TeamScores {
  using Memory = QuantizedMemory<Format>;
  static constexpr float kNothing = -1e30f;  ///< A reference maximum before the first visible key.

  const KernelParams& k;
  Memory& s;
  const TeamPlace& at;
  /// The thread's first key, the second being kHighKey further on, and where the first lies in a
  /// tile: its scales, its latent and its rope channels.
  const int key0 = at.keys * 16 + Format::key(at.g / 2, at.g % 2);
  const int row = kept(key0 * Format::kRowBytes);
  const int latent = kept(row + Format::latent_byte(at.half, at.c));
  const int rope = kept(row + Format::rope_byte(at.half, at.c));
  /// Of queries; lane l addresses row l % 8 of matrix l / 8 (row block, half of a k16 step). The
  /// block of rows that the warp owns comes first.
  const std::uint32_t q = kept(ptx::shared_address(s.q) +
                               ((at.lane / 16 ^ at.half) * 8 + at.lane % 8) * kQueryStride +
                               at.lane / 8 % 2 * 16 + at.half * 512);
  /// Of the thread's weights in P; lane l addresses row l % 8 of matrix l / 8 (keys).
  const int weights = kept((at.half * 8 + at.lane % 8) * 128 +
                           ((at.keys * 2 + at.lane / 8 % 2) ^ at.lane % 8) * 16);
  const int slot = at.team * kTeamThreads + at.warp * 32 + at.lane;  ///< In s.partial.
  /// Reference maxima (log2 units) and sums of the thread's columns.
  float max0 = kNothing, max1 = kNothing;
  float sum0 = 0.f, sum1 = 0.f;
  float offset0 = 0.f, offset1 = 0.f;  ///< Of outputs: what the codes' offsets have added.

  __device__ TeamScores(const KernelParams& k, const TeamPlace& at, Memory& s)
      : k(k), s(s), at(at) {}

  /// Queries' operands on their way: those of kAhead k16 steps.
  static constexpr int kAhead = Format::kGroups == 1 ? 3 : 2;
  using Queries = std::uint32_t[kAhead][4];
  static constexpr int kRopeSteps = 2;
  static constexpr int kSteps = kRopeSteps + 16;  ///< Of a warp: its rope and its latent channels.

  /// Asks for the queries of step `step`, 0 to kSteps - 1: rope channels come first.
  __device__ __forceinline__ void load_queries(int step, Queries& queries) const {
    ptx::load_matrices(queries[step % kAhead], step < kRopeSteps
                                                   ? q + (1024 - at.half * 448) + step * 32
                                                   : q + (step - kRopeSteps) * 32);
  }

  /// S^T of the warp's keys [16] and channels and all rows [16], the warp's own 8 first, with the
  /// keys' scales. The first queries are on their way.
  __device__ __forceinline__ void scores(const std::uint8_t* raw, Queries& queries,
                                         float (&score)[2][4]) const {
    constexpr int kChunks = 4;  // Latent ones.
    constexpr int kChunksOfScale = 8 / Format::kGroups < kChunks ? 8 / Format::kGroups : kChunks;
    constexpr int kToSecond = Format::kHighKey * Format::kRowBytes;
    std::uint32_t word[2][2][Format::kChunkWords];  // Of a chunk and the next.
    const auto load_chunk = [&](int n) {
      Format::load_latent(raw + latent, n, word[n % 2][0]);
      Format::load_latent(raw + latent + kToSecond, n, word[n % 2][1]);
    };
    const auto add_products = [&]<typename T>(T, int step, const std::uint32_t(&a)[4],
                                              float(&sum)[2][4]) {
      const std::uint32_t(&b)[4] = queries[step % kAhead];
      ptx::mma<T>(sum[0], a, b[0], b[1]);
      ptx::mma<T>(sum[1], a, b[2], b[3]);
      if (step + kAhead < kSteps) load_queries(step + kAhead, queries);
    };

    std::uint32_t rope_word[2][Format::kRopeWords];
    Format::load_rope(raw + rope, rope_word[0]);
    Format::load_rope(raw + rope + kToSecond, rope_word[1]);
    load_chunk(0);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) score[j][e] = 0.f;
    }
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      std::uint32_t a[4];
      Format::rope_operand(rope_word, step, a);
      using Rope = std::conditional_t<Format::kBf16Rope, __nv_bfloat16, __half>;
      add_products(Rope{}, step, a, score);
    }
    if constexpr (Format::kKeyScales && !Format::kBf16Rope) {
      const float scale0 = Format::rope_scale(row0(raw)), scale1 = Format::rope_scale(row1(raw));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) score[j][e] *= e < 2 ? scale0 : scale1;
      }
    }
#pragma unroll
    for (int n = 0; n < kChunks; n += kChunksOfScale) {
      float part[2][4] = {};
#pragma unroll
      for (int i = n; i < n + kChunksOfScale; ++i) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          std::uint32_t a[4];
          Format::score_operand(word[i % 2], step, a);
          if (step == 1 && i + 1 < kChunks) load_chunk(i + 1);
          add_products(__half{}, kRopeSteps + 4 * i + step, a,
                       Format::kKeyScales ? part : score);
        }
      }
      if constexpr (Format::kKeyScales) {
        const int group = at.half * (Format::kGroups / 2) + n / kChunksOfScale;
        const float scale0 = Format::latent_scale(row0(raw), group);
        const float scale1 = Format::latent_scale(row1(raw), group);
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
  __device__ __forceinline__ const std::uint8_t* row0(const std::uint8_t* raw) const {
    return raw + row;
  }
  __device__ __forceinline__ const std::uint8_t* row1(const std::uint8_t* raw) const {
    return raw + row + Format::kHighKey * Format::kRowBytes;
  }

  /// The pair's warps add what the other one has of their own columns.
  __device__ __forceinline__ void exchange(const float (&score)[2][4], float (&own)[4]) const {
    s.partial[slot] = float4{score[1][0], score[1][1], score[1][2], score[1][3]};
    ptx::named_barrier(kPairBarrier + at.team * 4 + at.keys, 64);
    const float4 other = s.partial[slot ^ 128];
    own[0] = score[0][0] + other.x;
    own[1] = score[0][1] + other.y;
    own[2] = score[0][2] + other.z;
    own[3] = score[0][3] + other.w;
  }

  __device__ __forceinline__ void team_barrier() const {
    ptx::named_barrier(kTeamBarrier + at.team, kTeamThreads);
  }

  /// Zeros keys of the pair that no row sees, and those that only some see if they hold a NaN: for
  /// the others 0 * NaN would spoil the output. Rows that see such a key have a NaN in its weight.
  __device__ __forceinline__ void clean_keys(std::uint8_t* raw, std::int32_t first_key) const {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int key = at.keys * 16 + at.half * 8 + i;
      const std::int32_t position = first_key + key;
      if (position >= s.visible.common_begin && position < s.visible.common_end) continue;
      auto* piece = reinterpret_cast<uint4*>(raw + key * Format::kRowBytes) + at.lane;
      bool clear = position < s.visible.any_begin || position >= s.visible.any_end;
      if (!clear) {
        const uint4 v = *piece;
        bool nan = false;
        for (const std::uint32_t w : {v.x, v.y, v.z, v.w}) {
          // 0x7f in a byte, whatever its sign.
          nan |= __vcmpeq4(w & 0x7f7f7f7f, 0x7f7f7f7f) != 0;
        }
        clear = __any_sync(~0u, nan);
      }
      if (clear) *piece = uint4{0, 0, 0, 0};
    }
    ptx::fence_async_proxy();  // A later tile comes to the same place.
  }

  __device__ __forceinline__ void mask(float (&own)[4], std::int32_t first_key) const {
    const std::int32_t window = k.op.window_left;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const std::int32_t position =
          s.visible.first_position + s.query_of_row[at.column + b];
      const std::int32_t begin = window < 0 ? 0 : position - window;
      const std::int32_t end = k.op.causal ? position + 1 : s.handover.job.seq_len;
      const std::int32_t a = first_key + key0, z = a + Format::kHighKey;
      if (a < begin || a >= end) own[b] = -INFINITY;
      if (z < begin || z >= end) own[2 + b] = -INFINITY;
    }
  }

  /// What a key's scales do to its weight, which is kept as 2^(score + log - max), log that of the
  /// largest scale, so that P, in f16, stays in range whatever the scales are; the weight without
  /// scales is that times `inverse`.
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
  /// What weights are multiplied by to become those of a group of channels.
  static __device__ __forceinline__ float ratio(const std::uint8_t* row, int group,
                                                const KeyWeight& w, bool all_visible) {
    if constexpr (Format::kGroups == 1) {
      return 1.f;
    } else {
      const float r = Format::latent_scale(row, group) * w.inverse;
      // Rows that see a key with a NaN have it in its weight, for the others 0 * NaN would spoil P.
      return all_visible || fabsf(r) < 4.f ? r : 1.f;
    }
  }

  /// P of the thread's keys and columns against the reference maxima, to shared memory; p is
  /// unscaled, `rounded` what was stored last, the columns of one key and of the other. Whether a
  /// score is so far above them that they must be raised first.
  __device__ __forceinline__ bool weigh(const std::uint8_t* raw, bool all_visible,
                                        const float (&own)[4], const KeyWeight& w0,
                                        const KeyWeight& w1, std::uint8_t* to, float (&p)[4],
                                        std::uint32_t (&rounded)[2]) const {
    const float above[4] = {own[0] - max0, own[1] - max1, own[2] - max0, own[3] - max1};
#pragma unroll
    for (int e = 0; e < 4; ++e) p[e] = exp2_approx(above[e]);
#pragma unroll
    for (int i = 0; i < Format::kGroups; ++i) {
      const float ratio0 = ratio(row0(raw), i, w0, all_visible);
      const float ratio1 = ratio(row1(raw), i, w1, all_visible);
      rounded[0] = pack<__half>(p[0] * ratio0, p[1] * ratio0);
      rounded[1] = pack<__half>(p[2] * ratio1, p[3] * ratio1);
      ptx::store_matrices_transposed(
          ptx::shared_address(to) + (weights + i * kQuantizedRows * 128), rounded[0], rounded[1]);
    }
    return fmaxf(fmaxf(above[0], above[1]), fmaxf(above[2], above[3])) > kMaxLag;
  }

  /// Makes the true maxima the reference where that is far below; the team's outputs so far are to
  /// be multiplied by s.factor.
  __device__ __forceinline__ void raise_maxima(const float (&own)[4]) {
    float over_keys0 = fmaxf(own[0], own[2]), over_keys1 = fmaxf(own[1], own[3]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      over_keys0 = fmaxf(over_keys0, __shfl_xor_sync(~0u, over_keys0, step));
      over_keys1 = fmaxf(over_keys1, __shfl_xor_sync(~0u, over_keys1, step));
    }
    if (at.g == 0) {
      *reinterpret_cast<float2*>(&s.warp_max[at.team][at.keys][at.column]) =
          float2{over_keys0, over_keys1};
    }
    team_barrier();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 other = *reinterpret_cast<const float2*>(&s.warp_max[at.team][i][at.column]);
      over_keys0 = fmaxf(over_keys0, other.x);
      over_keys1 = fmaxf(over_keys1, other.y);
    }
    const bool keep0 = over_keys0 <= max0 + kMaxLag, keep1 = over_keys1 <= max1 + kMaxLag;
    const float factor0 = keep0 ? 1.f : exp2_approx(max0 - over_keys0);
    const float factor1 = keep1 ? 1.f : exp2_approx(max1 - over_keys1);
    if (!keep0) max0 = over_keys0;
    if (!keep1) max1 = over_keys1;
    sum0 *= factor0;
    sum1 *= factor1;
    offset0 *= factor0;
    offset1 *= factor1;
    if (at.keys == 0 && at.g == 0) {
      *reinterpret_cast<float2*>(&s.factor[at.team][at.column]) = float2{factor0, factor1};
    }
  }

  /// S, softmax and P, to `to`, of the key tile `tile` in `raw`, with the first queries on their
  /// way. Afterwards, whether outputs are to be multiplied by s.factor first.
  __device__ __forceinline__ bool tile(std::uint8_t* raw, Queries& queries, std::int32_t tile,
                                       std::uint8_t* to) {
    float score[2][4], own[4];
    scores(raw, queries, score);
    exchange(score, own);
    const KeyWeight w0 = key_weight(row0(raw)), w1 = key_weight(row1(raw));
    if constexpr (Format::kCodeOffset != 0.f) {
      const float2 latent_offset = columns(s.offset[0]), rope_offset = columns(s.offset[1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::uint8_t* row = e < 2 ? row0(raw) : row1(raw);
        own[e] = fmaf(e % 2 == 0 ? latent_offset.x : latent_offset.y,
                      Format::latent_scale(row, 0), own[e]);
        own[e] = fmaf(e % 2 == 0 ? rope_offset.x : rope_offset.y, Format::rope_scale(row), own[e]);
      }
    }
    const float2 units = columns(s.score_scale);
    own[0] = fmaf(own[0], units.x, w0.log);
    own[1] = fmaf(own[1], units.y, w0.log);
    own[2] = fmaf(own[2], units.x, w1.log);
    own[3] = fmaf(own[3], units.y, w1.log);
    const auto common = static_cast<std::uint32_t>(tile - s.first_common);
    const bool all_visible = common < static_cast<std::uint32_t>(s.num_common);
    if (!all_visible) {
      const std::int32_t first_key = tile * kKeyTile;
      if constexpr (Format::kMayBeNan) clean_keys(raw, first_key);
      mask(own, first_key);
    }
    float p[4];
    std::uint32_t rounded[2];
    const bool far = weigh(raw, all_visible, own, w0, w1, to, p, rounded);
    const bool raised = ptx::named_barrier_any(kTeamBarrier + at.team, kTeamThreads, far);
    if (raised) {
      raise_maxima(own);
      weigh(raw, all_visible, own, w0, w1, to, p, rounded);
      team_barrier();
    }
    sum0 += p[0] * w0.inverse + p[2] * w1.inverse;
    sum1 += p[1] * w0.inverse + p[3] * w1.inverse;
    if constexpr (Format::kLowOffset != 0.f) {
      const float2 low = __half22float2(reinterpret_cast<const __half2&>(rounded[0]));
      const float2 high = __half22float2(reinterpret_cast<const __half2&>(rounded[1]));
      offset0 = fmaf(low.x, Format::kLowOffset, fmaf(high.x, Format::kHighOffset, offset0));
      offset1 = fmaf(low.y, Format::kLowOffset, fmaf(high.y, Format::kHighOffset, offset1));
    }
    return raised;
  }
  /// What the thread's columns have.
  __device__ __forceinline__ float2 columns(const float* of_rows) const {
    return *reinterpret_cast<const float2*>(of_rows + at.column);
  }

  /// Maxima and sums of the job, for whoever merges the teams' results.
  __device__ __forceinline__ void publish() {
    publish_sums(sum0, sum1, s.team_sum[at.team]);
    if constexpr (Format::kLowOffset != 0.f) {
      publish_sums(offset0, offset1, s.team_offset[at.team]);
    }
    if (at.keys == 0 && at.g == 0) {
      *reinterpret_cast<float2*>(&s.team_max[at.team][at.column]) =
          float2{max0 == kNothing ? -INFINITY : max0, max1 == kNothing ? -INFINITY : max1};
    }
  }
  __device__ __forceinline__ void publish_sums(float a, float b,
                                               float (&to)[4][kQuantizedRows]) const {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      a += __shfl_xor_sync(~0u, a, step);
      b += __shfl_xor_sync(~0u, b, step);
    }
    if (at.g == 0) *reinterpret_cast<float2*>(&to[at.keys][at.column]) = float2{a, b};
  }
};

}  // namespace fovea::cuda::mla
