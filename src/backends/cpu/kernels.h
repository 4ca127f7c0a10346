// What each instruction set provides: leaf kernels over plain memory.
//
// A kernel sees pointers and extents only. Threads, views, block tables and workspaces belong to
// the partition code (one file per op), which is built once for every processor. So nothing that an
// instruction set's unit compiles can be taken by the linker for another unit's: see isa_avx2.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/dtype.h"

namespace fovea::cpu {

/// Tokens of a tile of keys. Their f32 copy (64 x 592 x 4 bytes = 148 KiB for a latent of 512 + 64)
/// stays in a 512 KiB L2 beside the scores and what streams through.
inline constexpr std::int64_t kTileTokens = 64;
/// Tokens of a tile of bf16 keys, half as wide: as many bytes, and each visit to the sums of the
/// output adds twice as much.
inline constexpr std::int64_t kPairTileTokens = 128;
/// Tokens of a pair tile whose keys lie at one stride.
inline constexpr std::int64_t kPairGroupTokens = 16;
/// Rows that are scored at once: their scores (16 KiB) stay in L1 from Q K^T through P V.
inline constexpr std::int64_t kBlockRows = 64;
/// Every number of lanes divides it; also the floats of a cache line.
inline constexpr std::int64_t kMaxLanes = 16;

/// Scores of a block of at most kBlockRows rows and a tile of keys, and what is left of the tiles
/// before.
///
/// Lanes are rows: scores, maxima and sums of `lanes` rows share a vector, so that softmax over
/// tokens needs no reduction within one. Rows are padded to whole vectors; lanes beyond `rows` go
/// nowhere.
struct ScoreBlock {
  float* scores;   ///< Scratch [row vectors][capacity][lanes].
  float* row_max;  ///< [row vectors][lanes] of the scores so far, base 2.
  float* row_sum;  ///< [row vectors][lanes] of 2^(score - row_max).
  /// [rows][capacity / 64] bit t % 64 of word t / 64: the row sees token t of the tile. nullptr:
  /// all see all.
  const std::uint64_t* row_mask;
  /// Scores s become soft_cap * tanh(s / soft_cap), both times log2(e); 0: they stay.
  float soft_cap;
  std::int64_t capacity;  ///< Tokens that there is room for: a multiple of 64.
  std::int64_t rows;
  std::int64_t tokens;
};

/// The block's rows against keys and values in f32.
struct AttendTile : ScoreBlock {
  const float* q;  ///< Times sm_scale * log2(e): [row vectors][qk_channels][lanes]
  const float* k;  ///< [tokens][k_stride]
  const float* v;  ///< [tokens][v_stride], whole vectors readable.
  float* out;      ///< [rows][out_stride], whole vectors writable: sum of weights times values.
  std::int64_t k_stride;
  std::int64_t v_stride;
  std::int64_t out_stride;
  std::int64_t qk_channels;
  std::int64_t v_channels;
};

/// Index of f32, f16 and bf16 in the arrays below is their DType.
inline constexpr int kNumComputeDTypes = 3;

/// Index of the stored codes in Kernels::load_codes.
enum class Codes : int { f8e4m3fn, f8e5m2, i8, i4 };
inline constexpr int kNumCodes = 4;

/// Channels [end of the group before, end) of a row share a scale per token.
struct ChannelGroups {
  static constexpr int kMax = 5;  ///< DeepSeek's row: four of the latent, and the rope part.
  int count = 0;
  std::int64_t end[kMax] = {};
  std::int64_t widest() const {
    std::int64_t channels = 0, begin = 0;
    for (int g = 0; g < count; begin = end[g++]) {
      if (end[g] - begin > channels) channels = end[g] - begin;
    }
    return channels;
  }
};

/// Index of stored elements in the arrays of kernels that read them where they lie: f32, f16 and
/// bf16 as their DType, then Codes.
inline constexpr int kNumStored = kNumComputeDTypes + kNumCodes;

/// Keys or values of a tile in memory.
struct StoredRows {
  const std::byte* const* rows;  ///< [capacity], readable, if not seen, behind the last token too.
  std::int64_t head_at;     ///< Where the block's first head lies in a row, in bytes.
  std::int64_t head_bytes;  ///< From a head to the next.
  /// Where a head has the float32 scales of its groups, in bytes; negative: all are `scale`.
  std::int64_t scales_at;
  float scale;
  std::int64_t channels;
  ChannelGroups groups;
  std::int64_t offset_of(std::int64_t head) const { return head_at + head * head_bytes; }
};

/// Rows of several key heads against keys and values where they lie. Row r of head h is row
/// h * head_stride + r of the block; those from head_rows on go nowhere.
struct InPlaceTile : ScoreBlock {
  /// Times sm_scale * log2(e): [rows][q_stride], zeros up to whole vectors. Against bf16 keys, each
  /// whole 2 * lanes channels are a vector of the even ones and one of the odd ones.
  const float* q;
  /// Against int8 keys, in fixed point: [rows][q_code_stride], as query_codes.h lays them out.
  const std::int16_t* q_codes;
  std::int64_t q_code_stride;
  const float* q_steps;  ///< [rows] what q_codes count, times sm_scale * log2(e).
  float* out;      ///< [rows][out_stride], whole vectors writable: sum of weights times values.
  StoredRows k;
  StoredRows v;
  /// What is asked for: values while keys are at work, keys of the tile that comes next while
  /// values are.
  bool asks_for_values;
  const std::byte* const* next_keys;  ///< [num_next_keys]; nullptr: there are none.
  std::int64_t num_next_keys;
  std::int64_t heads;
  std::int64_t head_rows;
  std::int64_t head_stride;  ///< A power of two, or a multiple of kMaxLanes.
  std::int64_t q_stride;
  std::int64_t out_stride;
};

/// Keys of kPairGroupTokens tokens, all readable, those behind the tile's last token too.
struct KeyGroup {
  const std::byte* first;  ///< bf16 or int16.
  std::int64_t stride;     ///< In bytes.
};

/// The block's rows against keys and values, two of which are multiplied and added at once:
/// neighbouring channels in Q K^T, in bf16 or both in int16, neighbouring tokens in P V, in bf16.
struct PairTile : ScoreBlock {
  const std::uint32_t* q;  ///< Pairs of channels: [row vectors][qk_channels / 2][lanes]
  const float* q_steps;    ///< [row vectors][lanes] what int16 of q count; nullptr: bf16.
  const KeyGroup* k;       ///< [groups of tokens]
  const float* k_scales;   ///< [k_groups.count][capacity]: sm_scale * log2(e) is part of them.
  const std::uint32_t* v;  ///< [tokens / 2][v_stride] pairs of tokens, as pack_values leaves them.
  const float* v_scales;   ///< [v_groups.count][capacity]
  std::uint32_t* weights;  ///< Scratch [row vectors][capacity / 2][lanes] pairs of tokens.
  float* out;              ///< [rows][out_stride] in the order of pack_values.
  /// [capacity] rows of the tile that comes next, to be asked for meanwhile, `next_lines` cache
  /// lines each, at most one for 16 pairs of channels; nullptr: there is none. The same of values.
  const std::byte* const* next_keys;
  const std::byte* const* next_values;
  ChannelGroups k_groups;
  ChannelGroups v_groups;
  std::int64_t v_stride;
  std::int64_t out_stride;
  std::int64_t qk_channels;
  std::int64_t v_channels;
  bool v_is_finite;  ///< Values, as pack_values said, and where row_mask is there their scales.
};

/// Where an instruction set multiplies pairs of bf16 and adds both products to an f32.
struct PairKernels {
  /// What pack_values writes at once: an output row is a multiple of it.
  std::int64_t channels;
  /// [tokens] rows of values to [(tokens + 1) / 2][stride] pairs; nullptr, as what lies beyond the
  /// last token, counts as zeros.
  /// Channels are in an order of their own, within `channels` of them. Returns whether all values
  /// are finite.
  bool (*pack_values)(const std::byte* const* rows, std::int64_t tokens, std::int64_t num_channels,
                      std::int64_t stride, std::uint32_t* pairs);
  /// The same of rows of int16 that bf16 has.
  bool (*pack_int16_values)(const std::byte* const* rows, std::int64_t tokens,
                            std::int64_t num_channels, std::int64_t stride, std::uint32_t* pairs);
  /// Puts an output row back into the channels' own order.
  void (*restore_channels)(std::int64_t num_channels, float* row);
  void (*attend)(const PairTile& tile);
  /// Codes to bf16, exactly. Writes zeros up to whole vectors. Index: Codes.
  void (*widen[kNumCodes])(const void* src, std::int64_t n, BFloat16* dst);
  /// Codes of i8 to int16. Writes zeros up to whole vectors.
  void (*widen_to_int16)(const void* src, std::int64_t n, std::int16_t* dst);
  /// As multiply_add_rounds, of pairs.
  std::int64_t (*multiply_add_rounds)(std::int64_t rounds, float* sink);
};

struct Kernels {
  std::int64_t lanes;

  /// Row elements to f32. Writes zeros up to whole vectors, so `dst` holds a multiple of lanes.
  void (*load[kNumComputeDTypes])(const void* src, std::int64_t n, float* dst);
  /// Codes times `scale` to f32, as `load` writes them. i4: n is even, two codes per byte, low
  /// nibble first.
  void (*load_codes[kNumCodes])(const void* src, std::int64_t n, float scale, float* dst);
  /// Row elements times `scale`, rounded to nearest even.
  void (*store[kNumComputeDTypes])(const float* src, float scale, std::int64_t n, void* dst);
  float (*sum_squares[kNumComputeDTypes])(const void* x, std::int64_t n);
  /// out = x * scale * weight. `out` may be `x`.
  void (*scale_by_weight[kNumComputeDTypes])(const void* x, float scale, const float* weight,
                                             std::int64_t n, void* out);
  /// Turns channel pairs (i, i + half), or (2 i, 2 i + 1) when interleaved.
  void (*rotate[kNumComputeDTypes])(void* x, const float* cos, const float* sin, std::int64_t half,
                                    bool interleaved);
  /// sum += weight * x.
  void (*add_weighted)(const float* x, float weight, std::int64_t n, float* sum);
  void (*attend)(const AttendTile& tile);

  /// Attention in place, in this order, the first and the last for the elements of keys and of
  /// values.
  void (*score_in_place[kNumStored])(const InPlaceTile& tile);
  /// The same of i8 and queries in fixed point, whose products add up exactly.
  void (*score_int8_in_place)(const InPlaceTile& tile);
  bool query_digits;  ///< It takes queries as digits, else as words: query_codes.h.
  /// Scores of the block become weights. `correction` [row vectors][lanes] is what the sums of
  /// values so far shrink by.
  void (*weigh)(const ScoreBlock& block, float* correction);
  void (*add_in_place[kNumStored])(const InPlaceTile& tile, const float* correction);
  /// The same of i8, weights in fixed point.
  void (*add_int8_in_place)(const InPlaceTile& tile, const float* correction);

  /// `rounds` rounds of independent fused multiply-adds in registers. Returns their floating point
  /// operations; the result goes to `sink` so that they happen.
  std::int64_t (*multiply_add_rounds)(std::int64_t rounds, float* sink);
  /// Sum of n elements, a multiple of 64.
  float (*sum)(const float* x, std::int64_t n);
  const PairKernels* pairs;  ///< nullptr: the instruction set has no such products.
};

namespace scalar {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace neon {
extern const Kernels kKernels;
}

}  // namespace fovea::cpu
