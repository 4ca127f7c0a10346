// MLA decode over quantised rows. Raw rows travel; each role turns codes into f16 fragments in
// registers on their way into the tensor cores, so that no dequantised tile exists. Queries are
// f16, each row scaled by a power of two. A key's latent scale enters its score and its weight in
// P.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"
#include "backends/cuda/sm90/mla_decode/load.cuh"
#include "backends/cuda/sm90/mla_decode/outputs.cuh"
#include "backends/cuda/sm90/mla_decode/row_formats.cuh"
#include "backends/cuda/sm90/mla_decode/scores.cuh"

namespace fovea::cuda::mla {

/// M rows g and g + 8 are neighbouring channels.
template <typename Format>
struct QuantizedOrder {
  static constexpr int kStep = 1;
  static constexpr int kFlight = 4;
  static __device__ int channel(int chunk, int warp, int g) {
    return Format::channel(chunk, warp, g);
  }
};

/// Score warpgroups: what they do to a tile takes longer than bringing its bytes. Two of them take
/// two tiles at a time; 32 rows leave registers for one only.
template <int kRows>
constexpr int kScoreWarpgroups = kRows == 16 ? 2 : 1;
template <int kRows>
constexpr int kQuantizedThreads = kOutputThreads + 128 * kScoreWarpgroups<kRows> + 128;

template <typename Format, int kRows>
struct QuantizedMemory {
  static constexpr int kScorers = kScoreWarpgroups<kRows>;
  static constexpr int kTileBytes = kKeyTile * Format::kRowBytes;
  /// As many tiles as fit in 227 KB beside queries and the rest, 6 at most.
  static constexpr int kRest = (kChunks + kScorers) * kRows * 128 + 32 * kScorers * kRows + 2048;
  static constexpr int kFit = (227 * 1024 - kRest) / kTileBytes;
  static constexpr int kSlots = kFit < 6 ? kFit : 6;

  std::uint8_t q[kChunks][kRows * 128];   ///< f16, channels permuted as the format's fragments are.
  std::uint8_t p[kScorers][kRows * 128];  ///< P^T [rows][64 keys], f16, keys permuted likewise.
  alignas(16) std::uint8_t ring[kSlots][kTileBytes];
  float warp_max[2][4 * kScorers][kRows];
  float score_scale[kRows];  ///< From products with the scaled query row to log2 units.
  std::uint64_t full[kSlots];
  std::uint64_t empty[kSlots];
  std::uint8_t query_of_row[kRows];
  Handover<kRows> handover;
};

/// Queries as f16, each row times a power of two that brings its largest element near 2^14.
template <typename Format, int kRows>
__device__ void load_query_scaled(const KernelParams& k, const Job& job,
                                  QuantizedMemory<Format, kRows>& s) {
  constexpr int kWarps = 4 * kScoreWarpgroups<kRows>;
  const int lane = threadIdx.x % 32;
  const int thread = threadIdx.x - kOutputThreads;
  const MlaDecodeParams& op = k.op;
  const auto heads = static_cast<std::uint32_t>(op.num_heads);
  if (thread < kRows) {
    const std::uint32_t first = job.first_row, row = thread;
    s.query_of_row[row] = static_cast<std::uint8_t>((first + row) / heads - first / heads);
  }
  const bool bf16 = op.query_type == ElementType::bf16;
#pragma unroll 1
  for (int row = thread / 32; row < kRows; row += kWarps) {
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
      s.score_scale[row] = __uint_as_float((127 - 14 + exponent) << 23) * op.sm_scale * kLog2e;
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = Format::position(2 * lane + e);
        const float v = (e == 0 ? value[chunk].x : value[chunk].y) * factor;
        *reinterpret_cast<__half*>(s.q[chunk] + row * 128 + ((at / 8 ^ row % 8) * 16) +
                                   at % 8 * 2) = __float2half_rn(v);
      }
    }
  }
}

/// The score warpgroup at work on one job.
template <typename Format, int kRows>
struct QuantizedScores {
  using Memory = QuantizedMemory<Format, kRows>;
  static constexpr int kBlocks = kRows / 8;

  const KernelParams& k;
  const Job& job;
  Memory& s;
  const VisibleKeys visible;
  Softmax<kRows, 4 * Memory::kScorers> softmax;
  const int warpgroup = softmax.warp / 4;
  // The thread's two keys of a tile: those at M rows g and g + 8 of its warp.
  const int key0 = softmax.warp % 4 * 16 + Format::key(softmax.g / 2, softmax.g % 2);
  const int key1 = softmax.warp % 4 * 16 + Format::key(softmax.g / 2, 2 + softmax.g % 2);

  __device__ QuantizedScores(const KernelParams& k, const Job& job, Memory& s)
      : k(k), job(job), s(s), visible(visible_keys(k.op, job)) {}

  /// S^T of `count` chunks from `first` on.
  template <int first, int count>
  __device__ __forceinline__ void products(const std::uint8_t* tile, float (&score)[kRows / 2]) {
    std::uint64_t q_operand = ptx::swizzled_operand(ptx::shared_address(s.q[0]));
    asm volatile("" : "+l"(q_operand));  // Hoisted sums of it would spill.
    constexpr std::uint32_t kQueryChunk = kRows * 128 >> 4;
    std::uint32_t a[2][4][4];
    std::uint32_t word[2][Format::kChunkWords];
    const auto load = [&](int chunk) {
      const std::uint8_t* column = tile + chunk * Format::kChunkRowBytes;
      Format::load_words(column + key0 * Format::kRowBytes, softmax.c, word[0]);
      Format::load_words(column + key1 * Format::kRowBytes, softmax.c, word[1]);
    };
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int chunk = first + n;
      load(chunk);
      if (n >= 2) ptx::wgmma_wait<1>();  // The operands of two chunks ago are not read any more.
      Format::score_operands(word, a[n % 2]);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma_a_in_registers<kRows>(score, a[n % 2][step],
                                         q_operand + chunk * kQueryChunk + step * 2, n + step > 0);
      }
      ptx::wgmma_commit();
    }
  }

  /// Zeros keys of the warp that no row sees, and those that only some see if they hold a NaN: for
  /// the others 0 * NaN would spoil the output. Rows that see such a key have a NaN in its weight.
  __device__ __forceinline__ void clean_keys(std::uint8_t* tile, std::int32_t first_key) {
    const int lane = softmax.lane;
    __syncwarp();  // All lanes have their words of the warp's keys.
    for (int i = 0; i < 16; ++i) {
      const int key = softmax.warp % 4 * 16 + i;
      const std::int32_t at = first_key + key;
      if (at >= visible.common_begin && at < visible.common_end) continue;
      auto* piece = reinterpret_cast<uint4*>(tile + key * Format::kRowBytes) + lane;
      bool clear = at < visible.any_begin || at >= visible.any_end;
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
  }

  __device__ __forceinline__ void mask(float (&score)[kRows / 2], std::int32_t first_key) {
    const std::int32_t window = k.op.window_left;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const std::int32_t position =
            visible.first_position + s.query_of_row[8 * j + 2 * softmax.c + b];
        const std::int32_t begin = window < 0 ? 0 : position - window;
        const std::int32_t end = k.op.causal ? position + 1 : job.seq_len;
        const std::int32_t a = first_key + key0, z = first_key + key1;
        if (a < begin || a >= end) score[4 * j + b] = -INFINITY;
        if (z < begin || z >= end) score[4 * j + 2 + b] = -INFINITY;
      }
    }
  }

  /// Weights of a tile in log2 units: score + log2 of the key's latent scale, so that P, in f16,
  /// stays below 2^kMaxLag. What takes the scales out of sums again comes back.
  __device__ __forceinline__ float2 weigh(std::uint8_t* raw, std::int32_t tile, std::uint32_t empty,
                                          float (&score)[kRows / 2]) {
    float2 scale0{k.op.cache_scale, k.op.cache_scale}, scale1 = scale0;
    if constexpr (Format::kScales > 0) {
      products<8, 1>(raw, score);
      ptx::wgmma_wait<0>();
      ptx::pin(score);
      float latent[kRows / 2];
      products<0, 8>(raw, latent);
      ptx::wgmma_wait<0>();
      ptx::pin(latent);
      scale0 = *reinterpret_cast<const float2*>(raw + key0 * Format::kRowBytes + Format::kScales);
      scale1 = *reinterpret_cast<const float2*>(raw + key1 * Format::kRowBytes + Format::kScales);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          float& s0 = score[4 * j + b];
          float& s1 = score[4 * j + 2 + b];
          s0 = fmaf(s0, scale0.y, latent[4 * j + b] * scale0.x);
          s1 = fmaf(s1, scale1.y, latent[4 * j + 2 + b] * scale1.x);
        }
      }
    } else {
      products<0, kChunks>(raw, score);
      ptx::wgmma_wait<0>();
      ptx::pin(score);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) score[i] *= scale0.x;
    }
    const std::int32_t first_key = tile * kKeyTile;
    const bool all_visible =
        first_key >= visible.common_begin && first_key + kKeyTile <= visible.common_end;
    if (Format::kMayBeNan && !all_visible) clean_keys(raw, first_key);
    __syncwarp();
    if (softmax.lane == 0) ptx::mbarrier_arrive(empty);

    // A scale of 0 is taken as 2^-100.
    const float log0 = fmaxf(log2f(scale0.x), -100.f), log1 = fmaxf(log2f(scale1.x), -100.f);
    const float inverse0 = exp2f(-log0), inverse1 = exp2f(-log1);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 units = *reinterpret_cast<const float2*>(&s.score_scale[8 * j + 2 * softmax.c]);
      score[4 * j] = fmaf(score[4 * j], units.x, log0);
      score[4 * j + 1] = fmaf(score[4 * j + 1], units.y, log0);
      score[4 * j + 2] = fmaf(score[4 * j + 2], units.x, log1);
      score[4 * j + 3] = fmaf(score[4 * j + 3], units.y, log1);
    }
    if (!all_visible) mask(score, first_key);
    return float2{inverse0, inverse1};
  }

  /// This warpgroup's tile, in ring slot `slot`, of those that the score warpgroups take at once,
  /// if it `exists`.
  __device__ __forceinline__ void tile(bool exists, std::uint32_t slot, std::int32_t tile,
                                       std::uint32_t& message) {
    float score[kRows / 2];
    float2 inverse{0.f, 0.f};
    if (exists) {
      inverse = weigh(s.ring[slot], tile, ptx::shared_address(&s.empty[slot]), score);
    } else {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) score[i] = -INFINITY;
    }
    float over_keys[kBlocks][2];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      over_keys[j][0] = fmaxf(score[4 * j], score[4 * j + 2]);
      over_keys[j][1] = fmaxf(score[4 * j + 1], score[4 * j + 3]);
    }
    const auto change = softmax.advance_maxima(over_keys, s.warp_max[message & 1]);
    const float2 base = softmax.base();
    std::uint32_t packed[kBlocks][2];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float a = __shfl_sync(~0u, base.x, 4 * j + softmax.c);
      const float b = __shfl_sync(~0u, base.y, 4 * j + softmax.c);
      const float p0 = exp2_approx(score[4 * j] - a), p1 = exp2_approx(score[4 * j + 1] - b);
      const float p2 = exp2_approx(score[4 * j + 2] - a), p3 = exp2_approx(score[4 * j + 3] - b);
      over_keys[j][0] = p0 * inverse.x + p2 * inverse.y;
      over_keys[j][1] = p1 * inverse.x + p3 * inverse.y;
      packed[j][0] = pack<__half>(p0, p1);
      packed[j][1] = pack<__half>(p2, p3);
    }
    ptx::mbarrier_wait(ptx::shared_address(&s.handover.p_empty), (message & 1) ^ 1);
    ++message;
    store_probabilities<kRows>(ptx::shared_address(s.p[warpgroup]), packed);
    softmax.hand_over(change, s.handover);
    softmax.add_sums(over_keys, change);
  }
};

/// O^T [256 channels, rows] += V^T [256, 64] P^T [64, rows] over `tiles` key tiles.
template <typename Format, int kRows>
__device__ void accumulate_quantized(std::int32_t tiles, QuantizedMemory<Format, kRows>& s,
                                     RingPosition<QuantizedMemory<Format, kRows>::kSlots>& ring,
                                     std::uint32_t& message, OutputFragment<kRows>& out) {
  constexpr int kBlocks = kRows / 8;
  constexpr int kWord = Format::kTilesPerWord;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int g = lane / 4;
  const int c = lane % 4;
  // Of the first word of the lane's channels, of the key at place 0.
  constexpr int kWarpBytes = 8 * 4;
  const int first = warpgroup * (256 / 64 * Format::kChunkRowBytes) + warp * kWarpBytes + g * 4 +
                    Format::key(c, 0) * Format::kRowBytes;
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int e = 0; e < kRows / 2; ++e) out[i][e] = 0.f;
  }
  constexpr int kScorers = QuantizedMemory<Format, kRows>::kScorers;
  for (; tiles > 0; tiles -= kScorers) {
    ptx::mbarrier_wait(ptx::shared_address(&s.handover.p_full), message & 1);
    ++message;
    if (s.handover.rescale) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const float2 factor =
            *reinterpret_cast<const float2*>(&s.handover.message[0][8 * j + 2 * c]);
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
#pragma unroll 1
    for (int part = 0; part < min(kScorers, tiles); ++part) {
      const std::uint64_t p_operand = ptx::swizzled_operand(ptx::shared_address(s.p[part]));
      ptx::mbarrier_wait(ptx::shared_address(&s.full[ring.slot]), ring.parity);
      const std::uint8_t* words = s.ring[ring.slot] + first;
      constexpr int kSteps = kChunksPerOutput / kWord * 4;
      std::uint32_t a[2][kWord][4];
      std::uint32_t key[4];
      const auto load = [&](int n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int offset =
              (n % 4 * 16 + Format::key(0, i)) * Format::kRowBytes + n / 4 * 4 * kWarpBytes;
          key[i] = *reinterpret_cast<const std::uint32_t*>(words + offset);
        }
      };
      load(0);
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        const int block = n / 4, step = n % 4;
        if (n >= 2) ptx::wgmma_wait<1>();
        Format::value_operands(key, a[n % 2]);
        if (n + 1 < kSteps) load(n + 1);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kWord; ++i) {
          ptx::wgmma_a_in_registers<kRows>(out[block * kWord + i], a[n % 2][i],
                                           p_operand + step * 2, true);
        }
        ptx::wgmma_commit();
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[ring.slot]));
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kChunksPerOutput; ++i) ptx::pin(out[i]);
      ring.advance(1);
    }
    ptx::mbarrier_arrive(ptx::shared_address(&s.handover.p_empty));
  }
  ptx::mbarrier_wait(ptx::shared_address(&s.handover.p_full), message & 1);
  ++message;
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
    store_lse(op, job, row, s.message[0][row], s.message[1][row]);
  }
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int row = 8 * j + 2 * c + b;
      if (row >= job.num_rows) continue;
      const float inverse = inverse_sum(op, job, row, s.message[0][row], s.message[1][row]);
      const std::int64_t to = out_offset(op, job, row);
#pragma unroll
      for (int i = 0; i < kChunksPerOutput; ++i) {
        const int channel =
            Format::channel(threadIdx.x / 128 * kChunksPerOutput + i, thread / 32, g);
        const float v0 = out[i][4 * j + b] * inverse, v1 = out[i][4 * j + 2 + b] * inverse;
        if (op.out_type == ElementType::f32) {
          *reinterpret_cast<float2*>(static_cast<float*>(op.out) + to + channel) = float2{v0, v1};
        } else {
          *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(op.out) + to + channel) =
              op.out_type == ElementType::bf16 ? pack<__nv_bfloat16>(v0, v1) : pack<__half>(v0, v1);
        }
      }
    }
  }
}

/// Brings the block's key tiles. Boxes of rows that are contiguous and 16-byte aligned come by bulk
/// copies, all others in pieces of 8 bytes from all lanes of the loading warps.
template <typename Format, int kRows>
__device__ void load_quantized(const KernelParams& k, const Job& job, std::int32_t request,
                               QuantizedMemory<Format, kRows>& s,
                               RingPosition<QuantizedMemory<Format, kRows>::kSlots>& ring,
                               std::uint64_t policy) {
  constexpr int kPieces = Format::kRowBytes / 8;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const std::int32_t box_rows = k.box_rows;
  const auto block_size = static_cast<std::uint32_t>(k.op.block_size);
  const std::int32_t* blocks = k.op.block_table + request * k.op.block_table_stride;
  const auto* cache = static_cast<const std::uint8_t*>(k.op.cache);
  const auto row_of = [&](std::int32_t key) {
    const auto at = static_cast<std::uint32_t>(key);
    return cache + __ldg(blocks + at / block_size) * k.op.cache_block_stride +
           static_cast<std::int64_t>(at % block_size) * k.op.cache_row_stride;
  };
  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile) {
    const std::int32_t first = tile * kKeyTile;
    const std::int32_t keys = min(kKeyTile, job.seq_len - first);
    const std::uint32_t full = ptx::shared_address(&s.full[ring.slot]);
    const std::uint32_t to = ptx::shared_address(s.ring[ring.slot]);
    if (k.bulk_rows) {
      // Asked for before the slot is free, so that the table's answer is here by then.
      const int boxes = (keys + box_rows - 1) / box_rows;
      const std::uint8_t* row[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (lane + 32 * i < boxes) row[i] = row_of(first + (lane + 32 * i) * box_rows);
      }
      ptx::wait_for_previous_kernel();
      ptx::mbarrier_wait(ptx::shared_address(&s.empty[ring.slot]), ring.parity ^ 1);
      const std::uint32_t box_bytes = box_rows * Format::kRowBytes;
      if (lane == 0) ptx::mbarrier_arrive_expect(full, boxes * box_bytes);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int box = lane + 32 * i;
        if (box < boxes) ptx::load_bytes(to + box * box_bytes, row[i], box_bytes, full, policy);
      }
    } else {
      ptx::wait_for_previous_kernel();
      ptx::mbarrier_wait(ptx::shared_address(&s.empty[ring.slot]), ring.parity ^ 1);
#pragma unroll 1
      for (std::int32_t i = thread; i < keys * kPieces; i += 128) {
        const std::int32_t key = i / kPieces, piece = i % kPieces;
        ptx::copy_8_bytes(to + i * 8, row_of(first + key) + piece * 8);
      }
      ptx::arrive_after_copies(full);
    }
    ring.advance(1);
  }
}

template <typename Format, int kRows>
__global__ void __launch_bounds__(kQuantizedThreads<kRows>, 1)
    mla_decode_quantized_kernel(const __grid_constant__ KernelParams k) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  using Memory = QuantizedMemory<Format, kRows>;
  auto& s = *reinterpret_cast<Memory*>(shared_bytes);
  constexpr int kSlots = Memory::kSlots;
  constexpr int kScorers = Memory::kScorers;
  // Of 65536 registers, 480 a thread of 128 with five warpgroups, 512 with four.
  // Outputs over int4 need more of them, scores fewer.
  constexpr int kShift = kScorers == 2 && std::is_same_v<Format, Int4PerToken> ? 8 : 0;
  constexpr int kOutputRegisters = (kScorers == 2 ? 96 : 144) + kShift;
  constexpr int kScoreRegisters = (kScorers == 2 ? 120 : 160) - kShift;
  constexpr int kLoadRegisters = kScorers == 2 ? 48 : 64;

  const int row_tiles = k.geometry.row_tiles_per_group;
  const int splits = k.geometry.splits_per_group;
  const std::int32_t group = blockIdx.x / (row_tiles * splits);
  const int rank = blockIdx.x % (row_tiles * splits);
  const int row_tile = rank % row_tiles;
  const int split = rank / row_tiles;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.full[i]), k.bulk_rows ? 1 : 128);
      ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), 4 + kOutputThreads / 32);
    }
    s.handover.init(splits, 128 * kScorers);
    ptx::mbarrier_init_fence();
  }
  if (splits > 1) {  // The others' barriers are arrived at.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  // As in mla_decode_kernel: what is older than the kernel before may be read before the wait.
  JobWalk walk(k, group, kRows, row_tile, split);
  Job job;

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  RingPosition<kSlots> ring;
  std::uint32_t message = 0;
  if (warp < 4 * kOutputWarpgroups) {
    if constexpr (kOutputRegisters > 96) ptx::take_registers<kOutputRegisters>();
    OutputFragment<kRows> out;
    ptx::wait_for_previous_kernel();
    while (walk.next(job)) {
      ptx::named_barrier(kOutputBarrier, kOutputThreads);  // The job before is not read any more.
      if (threadIdx.x == 0) s.handover.begin(job, walk.range());
      ptx::named_barrier(kOutputBarrier, kOutputThreads);
      accumulate_quantized<Format, kRows>(job.tile_end - job.tile_begin, s, ring, message, out);
      finish<kRows, QuantizedOrder<Format>>(k, s.handover, out, [&] { s.handover.release(); });
    }
  } else if (warp < 4 * (kOutputWarpgroups + kScorers)) {
    ptx::take_registers<kScoreRegisters>();
    while (walk.next(job)) {
      ptx::wait_for_previous_kernel();
      load_query_scaled<Format, kRows>(k, job, s);
      ptx::fence_async_proxy();
      ptx::named_barrier(kScoreBarrier, 128 * kScorers);
      QuantizedScores<Format, kRows> scores(k, job, s);
      for (std::int32_t tile = job.tile_begin; tile < job.tile_end; tile += kScorers) {
        const int own = scores.warpgroup;
        const auto at = ring.plus(own);
        const bool exists = tile + own < job.tile_end;
        if (exists) ptx::mbarrier_wait(ptx::shared_address(&s.full[at.slot]), at.parity);
        scores.tile(exists, at.slot, tile + own, message);
        ring.advance(min(kScorers, job.tile_end - tile));
      }
      scores.softmax.publish_sums(s.warp_max[0], s.handover, message);
    }
  } else {
    ptx::give_registers<kLoadRegisters>();
    const int loader = warp - 4 * (kOutputWarpgroups + kScorers);
    const std::uint64_t policy = ptx::make_l2_policy(row_tiles == 1 ? ptx::L2Policy::evict_first
                                                                    : ptx::L2Policy::evict_normal);
    if (loader == 1) {
      ptx::wait_for_previous_kernel();
      ptx::let_next_kernel_start();
      clear_unused_rows(k.op, blockIdx.x, gridDim.x);
    }
    while (walk.next(job)) {
      if (loader == 0 || !k.bulk_rows) {
        load_quantized<Format, kRows>(k, job, walk.request(), s, ring, policy);
      }
    }
  }
}

}  // namespace fovea::cuda::mla
