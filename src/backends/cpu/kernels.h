// What each instruction set provides: leaf kernels over plain memory.
//
// A kernel sees pointers and extents only. Threads, views, block tables and workspaces belong to
// the partition code (one file per op), which is built once for every processor. So nothing that an
// instruction set's unit compiles can be taken by the linker for another unit's: see isa_avx2.cc.
#pragma once

#include <cstdint>

namespace fovea::cpu {

/// Tokens of a tile of keys. Their f32 copy (64 x 592 x 4 bytes = 148 KiB for a latent of 512 + 64)
/// stays in a 512 KiB L2 beside the scores and what streams through.
inline constexpr std::int64_t kTileTokens = 64;
static_assert(kTileTokens <= 64, "a row's mask over a tile is 64 bits");
/// Rows that are scored at once: their scores (16 KiB) stay in L1 from Q K^T through P V.
inline constexpr std::int64_t kBlockRows = 64;
/// Every number of lanes divides it; also the floats of a cache line.
inline constexpr std::int64_t kMaxLanes = 16;

/// A block of at most kBlockRows rows against a tile of at most kTileTokens keys.
///
/// Lanes are rows: scores, maxima and sums of `lanes` rows share a vector, so that softmax over
/// tokens needs no reduction within one. Rows are padded to whole vectors; lanes beyond `rows` hold
/// finite numbers and go nowhere.
struct AttendTile {
  const float* q;  ///< [row vectors][qk_channels][lanes], times sm_scale * log2(e).
  const float* k;  ///< [tokens][k_stride]
  const float* v;  ///< [tokens][v_stride], whole vectors readable.
  float* out;      ///< [rows][out_stride], whole vectors writable: sum of weights times values.
  float* row_max;  ///< [row vectors][lanes] of the scores so far, base 2.
  float* row_sum;  ///< [row vectors][lanes] of 2^(score - row_max).
  float* scores;   ///< Scratch [row vectors][kTileTokens][lanes].
  /// [rows] bit t: the row sees token t of the tile. nullptr: all see all.
  const std::uint64_t* row_mask;
  /// Scores s become soft_cap * tanh(s / soft_cap), both times log2(e); 0: they stay.
  float soft_cap;
  std::int64_t k_stride;
  std::int64_t v_stride;
  std::int64_t out_stride;
  std::int64_t qk_channels;
  std::int64_t v_channels;
  std::int64_t rows;
  std::int64_t tokens;
};

/// Index of f32, f16 and bf16 in the arrays below is their DType.
inline constexpr int kNumComputeDTypes = 3;

/// Index of the stored codes in Kernels::load_codes.
enum class Codes : int { f8e4m3fn, f8e5m2, i8, i4 };
inline constexpr int kNumCodes = 4;

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

  /// `rounds` rounds of independent fused multiply-adds in registers. Returns their floating point
  /// operations; the result goes to `sink` so that they happen.
  std::int64_t (*multiply_add_rounds)(std::int64_t rounds, float* sink);
  /// Sum of n elements, a multiple of 64.
  float (*sum)(const float* x, std::int64_t n);
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

}  // namespace fovea::cpu
