// Attention of a warp over its slices: S = Q K^T, softmax, O += P V, 16 rows.
#pragma once

#include "backends/cuda/sm90/attention_decode/block.cuh"
#include "backends/cuda/sm90/finite.cuh"
#include "backends/cuda/sm90/ptx/mma.cuh"
#include "backends/cuda/sm90/row_softmax.cuh"

namespace fovea::cuda::decode {

/// Of a lane: its two rows' columns 2 c and the next of each tile of 8 channels, as scores lie.
template <typename W>
using OutputFragment = float[W::kDim / 2];

/// Piece `piece` of a query row: 8 channels of one tile.
template <typename W>
__device__ __forceinline__ uint4 query_piece(const std::uint16_t* row, int piece) {
  constexpr int kTiles = W::Heads::kInterleave;
  if constexpr (kTiles == 1) {
    return __ldg(reinterpret_cast<const uint4*>(row + piece * 8));
  } else {
    row += piece / kTiles * 8 * kTiles + piece % kTiles;
    const auto pair = [&](int n) {
      return __ldg(row + n * kTiles) | std::uint32_t{__ldg(row + (n + 1) * kTiles)} << 16;
    };
    return {pair(0), pair(2), pair(4), pair(6)};
  }
}

/// What the rows of a job see, to shared memory. Run by one warp.
template <typename W>
__device__ __forceinline__ void find_visible(const KernelParams& k, const JobRows& rows,
                                             SharedMemory<W>& s) {
  const int lane = threadIdx.x % 32;
  const SeenKeys seen = rows.seen(lane % kRows);
  VisibleKeys visible{__reduce_min_sync(~0u, seen.begin), __reduce_max_sync(~0u, seen.end),
                      __reduce_max_sync(~0u, seen.begin), __reduce_min_sync(~0u, seen.end)};
  // Which drafts a row sees is for its bits.
  if (k.op.draft_tree != nullptr) visible.common_end = rows.context();
  if (lane < kRows) s.seen[lane] = seen;
  if (lane == 0) s.visible = visible;
}

/// A share, queries of its job, and what they see, to shared memory. Rows that do not exist, and
/// channels past the last, are zeros. Run by all threads.
template <typename W>
__device__ __forceinline__ void load_query(const KernelParams& k, const JobShare& share,
                                           SharedMemory<W>& s) {
  const JobRows rows(k, share);
  __syncthreads();  // What merged the job before may still be read.
  if (threadIdx.x == 32) s.share = share;
  for (int i = threadIdx.x; i < kRows * W::kPieces; i += kThreads) {
    const int row = i / W::kPieces, piece = i % W::kPieces;
    uint4 value{0, 0, 0, 0};
    if (row < rows.num_rows && piece * 8 < k.op.qk_dim) {
      const std::int64_t at =
          (std::int64_t{rows.query_begin} + rows.token(row)) * k.op.q_row_stride +
          rows.head(row) * k.op.q_head_stride;
      value = query_piece<W>(static_cast<const std::uint16_t*>(k.op.q) + at, piece);
    }
    *reinterpret_cast<uint4*>(&s.q[row][piece_offset(row, piece)]) = value;
  }
  if (threadIdx.x < 32) find_visible<W>(k, rows, s);
  __syncthreads();
}

/// Of a slice's keys, those that a lane's two rows see: bit i is key i.
using SeenBits = std::uint32_t[2];

template <typename W>
struct Attention {
  using T = typename W::T;
  using Heads = typename W::Heads;
  static constexpr int kSteps = W::kDim / 16;
  static constexpr int kColumns = W::kCodeBytes / 16;  ///< Of 16 bytes, of a row of codes.
  static constexpr int kParts = std::is_same_v<T, __half> ? 2 : 1;  ///< Of a weight for codes.
  /// The second part may be 0 or negative, so that no infinity may meet it, whoever sees it.
  static constexpr bool kCleansAll = kParts > 1 && std::is_same_v<Heads, Fp8E5m2Heads>;

  const KernelParams& k;
  const SeenKeys* const seen_keys;              ///< Of the lane's first row; the second is 8 on.
  const std::int32_t loaded_begin, loaded_end;  ///< Keys that were copied.
  const std::int32_t first_draft;               ///< Behind all keys without a draft tree.
  const int lane = threadIdx.x % 32;
  const VisibleKeys visible;
  Softmax softmax;
  OutputFragment<W> out = {};

  __device__ Attention(const KernelParams& k, const JobShare& share, const SharedMemory<W>& s)
      : k(k),
        seen_keys(&s.seen[threadIdx.x % 32 / 4]),
        loaded_begin(k.shape.first_key(share.seq_len, share.query_len)),
        loaded_end(share.seq_len),
        first_draft(k.op.draft_tree != nullptr ? share.seq_len - share.query_len : INT32_MAX),
        visible(s.visible) {}

  /// S = Q K^T of rows of T.
  __device__ __forceinline__ void add_scores(float (&score)[8], std::uint32_t query,
                                             std::uint32_t keys) const {
    const int key = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t a[4], b[4];
      load_queries(a, query, step);
      ptx::load_matrices(
          b, keys + key * W::kDim * 2 + piece_offset(key, step * 2 + lane / 8 % 2));
      ptx::mma<T>(score, a, b[0], b[1]);
      ptx::mma<T>(score + 4, a, b[2], b[3]);
    }
  }

  /// The same of codes; scores of a head's halves apart.
  __device__ __forceinline__ void add_code_scores(float (&score)[2][8], std::uint32_t query,
                                                  std::uint32_t keys) const {
    constexpr int kPairs = Heads::kInterleave;
    const int key = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int column = 0; column < kColumns; column += 2) {
      std::uint32_t m[4];  // Keys 0 to 7 of two columns, then keys 8 to 15.
      ptx::load_matrices(m, keys + key * W::kRowBytes + (column + lane / 8 % 2) * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t b[2][kPairs];
        Heads::template convert<T>(m[i], b[0]);
        Heads::template convert<T>(m[2 + i], b[1]);
        float* sum = score[(column + i) * 2 / kColumns];
#pragma unroll
        for (int n = 0; n < kPairs; n += 2) {
          std::uint32_t a[4];
          load_queries(a, query, ((column + i) * kPairs + n) / 2);
          ptx::mma<T>(sum, a, b[0][n], b[0][n + 1]);
          ptx::mma<T>(sum + 4, a, b[1][n], b[1][n + 1]);
        }
      }
    }
  }

  /// A fragment of 16 query rows and channels.
  __device__ __forceinline__ void load_queries(std::uint32_t (&a)[4], std::uint32_t query,
                                               int step) const {
    const int row = lane / 8 % 2 * 8 + lane % 8;
    ptx::load_matrices(a, query + row * W::kDim * 2 + piece_offset(row, step * 2 + lane / 16));
  }

  /// O += P V.
  __device__ __forceinline__ void add_outputs(const float (&score)[8], std::uint32_t values) {
    std::uint32_t weight[4];
    pack_weights<T>(score, weight);
    const int row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t b[4];
      ptx::load_matrices_transposed(
          b, values + row * W::kDim * 2 + piece_offset(row, step * 2 + lane / 16));
      ptx::mma<T>(out + 8 * step, weight, b[0], b[1]);
      ptx::mma<T>(out + 8 * step + 4, weight, b[2], b[3]);
    }
  }

  /// The same of codes; weights for a head's halves apart, with scales, so in bf16. Where that is
  /// too coarse, what it rounds away is a second weight.
  __device__ __forceinline__ void add_code_outputs(float (&score)[2][8], std::uint32_t values) {
    constexpr int kTiles = Heads::kInterleave;
    std::uint32_t weight[kParts][4];
    const int row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int column = 0; column < kColumns; column += 2) {
      std::uint32_t m[4];  // Of two columns keys 0 to 7 and 8 to 15 each.
      ptx::load_matrices_transposed(m, values + row * W::kRowBytes + (column + lane / 16) * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int half = (column + i) * 2 / kColumns;
        if ((column + i) * 2 % kColumns == 0) pack_code_weights(score[half], weight);
        std::uint32_t b[2][kTiles];
        Heads::template convert<__nv_bfloat16>(m[2 * i], b[0]);
        Heads::template convert<__nv_bfloat16>(m[2 * i + 1], b[1]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            ptx::mma<__nv_bfloat16>(out + 4 * ((column + i) * kTiles + n),
                                    weight[part], b[0][n], b[1][n]);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void pack_code_weights(float (&score)[8],
                                                           std::uint32_t (&weight)[kParts][4]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      pack_weights<__nv_bfloat16>(score, weight[part]);
      if (part + 1 == kParts) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) score[i] -= __bfloat162float(__float2bfloat16_rn(score[i]));
    }
  }

  template <typename Weight>
  static __device__ __forceinline__ void pack_weights(const float (&score)[8],
                                                      std::uint32_t (&weight)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = pack<Weight>(score[2 * i], score[2 * i + 1]);
  }

  /// Scores of keys from `first` on become weights; earlier outputs follow.
  __device__ __forceinline__ void weigh(float (&score)[8], std::int32_t first, SeenBits& seen) {
    float scale = k.op.sm_scale * kLog2e;
    if (k.op.variant.soft_cap > 0.f) {
      cap_scores<kKeys>(score, k.op.sm_scale, k.op.variant.soft_cap);
      scale = 1.f;
    }
    if (!visible.are_common(first, first + kKeys)) {
      find_seen(first, seen);
      mask_unseen<kKeys>(score, seen);
    }
    const float2 factor = softmax.weigh<kKeys>(score, scale);
    if (!__any_sync(~0u, factor.x != 1.f || factor.y != 1.f)) return;
#pragma unroll
    for (int i = 0; i < W::kDim / 2; ++i) out[i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
  }

  /// Takes in the slice of keys from `first` on.
  __device__ __forceinline__ void add(std::uint32_t query, Slice<W>& slice, std::int32_t first) {
    const std::uint32_t keys = ptx::shared_address(slice.k);
    const std::uint32_t values = ptx::shared_address(slice.v);
    if constexpr (Heads::kQuantized) {
      float score[2][8] = {};
      add_code_scores(score, query, keys);
      SeenBits seen;
      if constexpr (kCleansAll) seen[0] = seen[1] = ~0u;
      weigh_halves(score, slice, first, seen);
      if constexpr (Heads::kMayNotBeFinite) clean_codes(slice.v, first, seen);
      add_code_outputs(score, values);
    } else {
      float score[8] = {};
      add_scores(score, query, keys);
      SeenBits seen;
      weigh(score, first, seen);
      clean_values(slice.v, first, seen);
      add_outputs(score, values);
    }
  }

  /// Scores of a head's halves become weights for them: scales multiply both, not channels.
  __device__ __forceinline__ void weigh_halves(float (&score)[2][8], const Slice<W>& slice,
                                               std::int32_t first, SeenBits& seen) {
    float weight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 scales = scales_of<T>(slice.k, i, k.op.k_scale);
      weight[i] = score[0][i] * scales.x + score[1][i] * scales.y;
    }
    weigh(weight, first, seen);
    const bool hides = hides_keys(first);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // A key that a row does not see weighs nothing, whatever its scales are.
      const bool hidden = hides && !has_bit(seen[i / 2 % 2], key_of(i));
      const float2 scales = scales_of<__nv_bfloat16>(slice.v, i, k.op.v_scale);
      score[0][i] = hidden ? 0.f : weight[i] * scales.x;
      score[1][i] = hidden ? 0.f : weight[i] * scales.y;
    }
  }

  /// The key, of the slice, of element `i` of a score fragment.
  __device__ __forceinline__ int key_of(int i) const { return i / 4 * 8 + lane % 4 * 2 + i % 2; }
  /// The scales of both halves of that key's head, for codes in `Element`.
  template <typename Element>
  __device__ __forceinline__ float2 scales_of(const std::uint8_t (&heads)[kKeys][W::kRowBytes],
                                              int i, float of_tensor) const {
    if constexpr (Heads::kScaleBytes == 0) return {of_tensor, of_tensor};
    const auto scales = *reinterpret_cast<const float2*>(&heads[key_of(i)][W::kCodeBytes]);
    constexpr float kUnit = Heads::template kUnit<Element>;
    return {scales.x * kUnit, scales.y * kUnit};
  }

  /// What the lane's rows see of a slice that some row does not see in full.
  __device__ __forceinline__ void find_seen(std::int32_t first, SeenBits& seen) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const SeenKeys& of_row = seen_keys[8 * r];
      seen[r] = bits_between<std::uint32_t>(of_row.begin - first, of_row.end - first);
      if (first + kKeys <= first_draft) continue;
      seen[r] &= static_cast<std::uint32_t>(drafts_of_tile(of_row.drafts, first_draft - first));
    }
  }
  static __device__ __forceinline__ bool has_bit(std::uint32_t bits, int i) {
    return (bits >> i & 1) != 0;
  }

  /// Some row does not see some key of the slice that was copied.
  __device__ __forceinline__ bool hides_keys(std::int32_t first) const {
    return !visible.are_common(max(first, loaded_begin), min(first + kKeys, loaded_end));
  }

  /// Zeros, before a product, values that some row does not see and that would spoil it: of keys
  /// that no row of the job sees all, of others what is not finite, once it is in the outputs of
  /// rows that see it. Keys that were not copied are zeros.
  __device__ __forceinline__ void clean_values(Rows<W>& values, std::int32_t first,
                                               const SeenBits& seen) {
    if (!hides_keys(first)) return;
    bool bad = false;
    auto* pieces = reinterpret_cast<uint4*>(values);
    for (int i = lane; i < kKeys * W::kPieces; i += 32) {
      const std::int32_t key = first + i / W::kPieces;
      if (key < visible.any_begin || key >= visible.any_end) {
        pieces[i] = uint4{0, 0, 0, 0};
      } else {
        bad |= any_not_finite<T>(pieces[i]);
      }
    }
    if (__any_sync(~0u, bad)) {
#pragma unroll 1
      for (int i = 0; i < kKeys; ++i) {
#pragma unroll
        for (int j = 0; j < W::kDim / 8; ++j) {
          const auto word = *reinterpret_cast<const std::uint32_t*>(
              &values[i][piece_offset(i, j) + lane % 4 * 4]);
          add_not_finite<T>(word, has_bit(seen[0], i), has_bit(seen[1], i), out + 4 * j);
        }
      }
      __syncwarp();
      for (int i = lane; i < kKeys * W::kPieces; i += 32) pieces[i] = only_finite<T>(pieces[i]);
    }
    __syncwarp();
  }

  /// The same of codes.
  __device__ __forceinline__ void clean_codes(std::uint8_t (&values)[kKeys][W::kRowBytes],
                                              std::int32_t first, const SeenBits& seen) {
    if (!kCleansAll && !hides_keys(first)) return;
    constexpr int kWords = W::kCodeBytes / 4;
    const auto word_at = [&](int row, int word) -> std::uint32_t& {
      return *reinterpret_cast<std::uint32_t*>(&values[row][word * 4]);
    };
    bool bad = false;
#pragma unroll 1
    for (int i = lane; i < kKeys * kWords; i += 32) {
      std::uint32_t& word = word_at(i / kWords, i % kWords);
      const std::int32_t key = first + i / kWords;
      if (key < visible.any_begin || key >= visible.any_end) {
        word = 0;
      } else {
        bad |= Heads::not_finite(word) != 0;
      }
    }
    if (__any_sync(~0u, bad)) {
#pragma unroll 1
      for (int i = 0; i < kKeys; ++i) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          // Four channels: two tiles' columns 2 c, then two tiles' columns 2 c + 1.
          const std::uint32_t codes = word_at(i, column * 4 + lane % 4);
          const std::uint32_t bad_codes = Heads::not_finite(codes);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            if ((bad_codes >> (8 * n) & 0x80) == 0) continue;
            const float value = Heads::value(codes >> (8 * n) & 0xff);
            float* at = out + 4 * (column * 2 + n % 2) + n / 2;
            if (has_bit(seen[0], i)) at[0] += value;
            if (has_bit(seen[1], i)) at[2] += value;
          }
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < kKeys * kWords; i += 32) {
        std::uint32_t& word = word_at(i / kWords, i % kWords);
        word &= ~((Heads::not_finite(word) >> 7) * 0xff);
      }
    }
    __syncwarp();
  }
};

}  // namespace fovea::cuda::decode
