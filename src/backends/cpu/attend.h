// Attention of query rows that share keys: what rows keep between tiles, tiles, and visibility.
//
// A state is one of three: FloatState takes keys and values as f32, PairState as bf16, InPlaceState
// where they lie.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "backends/cpu/kernels.h"
#include "backends/cpu/rows.h"
#include "variants/visibility.h"

namespace fovea::cpu {

/// Rows that are worked on together share each tile's conversion. Beyond this many that saves
/// nothing more, and their queries and sums would only take memory (2.4 MB for 576 and 512 channels
/// of f32).
inline constexpr std::int64_t kMaxRows = 512;

/// A sink of no weight.
inline constexpr float kNoSink = -std::numeric_limits<float>::infinity();

struct AttendShape {
  std::int64_t qk_channels = 0;
  std::int64_t v_channels = 0;
  std::int64_t max_rows = 0;    ///< At most kMaxRows.
  std::int64_t max_heads = 1;   ///< Key heads that these are of.
  bool values_in_keys = false;  ///< A value is the first v_channels of its key.
  bool int8_keys = false;       ///< Stored keys are codes of int8 that meet fixed point.
  bool int8_values = false;     ///< Stored values are codes of int8 that meet fixed point.
  bool bf16_keys = false;       ///< Stored keys are bf16.
  float score_factor = 0.f;     ///< sm_scale * log2(e)
  float soft_cap = 0.f;         ///< Of the natural scores; 0: none.
  ChannelGroups k_groups;  ///< Of stored keys; FloatState alone does without these and the next.
  ChannelGroups v_groups;
};

/// Rows [first_row, first_row + count) of the [query token][rows_per_query] rows of a sequence.
struct QueryRows {
  std::int64_t count = 0;
  std::int64_t rows_per_query = 1;
  std::int64_t first_row = 0;
  SequenceExtent extent;
  /// Query token of row `row`, counted from first_row.
  std::int64_t query_of(std::int64_t row) const { return (first_row + row) / rows_per_query; }
};

/// Rows of several key heads in one state: those of head h are rows h * stride to h * stride +
/// count of it.
struct HeadRows {
  std::int64_t num_heads = 1;
  std::int64_t count = 0;
  std::int64_t stride = 0;
  /// Heads start at whole vectors.
  static std::int64_t stride_of(std::int64_t count) {
    return (count + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  }
};

/// Whether lanes are better channels than rows: at least half of them would be empty. `group`, the
/// query heads that share keys, is the layer's, so that a row's bits do not depend on how many
/// query tokens it is worked on with.
inline bool has_few_rows(const Kernels& kernels, std::int64_t group) {
  return 2 * group <= kernels.lanes;
}

/// Hands out pieces of memory, aligned to Workspace::kAlignment, or only counts them.
class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(memory) {}
  template <class T>
  T* take(std::int64_t count) {
    return reinterpret_cast<T*>(take_bytes(count * std::int64_t{sizeof(T)}));
  }
  std::int64_t used() const { return used_; }

 private:
  std::byte* take_bytes(std::int64_t bytes);

  std::byte* memory_;
  std::int64_t used_ = 0;
};

/// Elements from a row of n to the next: room for whole vectors from any element on, and an odd
/// number of cache lines. A power of two would put a column of rows into few sets of L1.
std::int64_t padded_stride(std::int64_t n, std::int64_t element_bytes);

/// n numbers as multiples of what it returns, each off by half of that at most: 2^-16 of the
/// largest magnitude and a 250th of that more, for a code is at most two digits of 127; more where
/// `summed`, the products with int8 that must add up to int32, are more than 514. NaN where one is
/// not finite.
float to_fixed_point(const float* x, std::int64_t n, std::int64_t summed, std::int16_t* codes);

/// Running softmax and sums of values of up to max_rows rows.
class RowState {
 public:
  /// Room for a row's qk_channels, to be filled before set_query.
  float* query_buffer() { return query_; }

 protected:
  RowState(const Kernels& kernels, const AttendShape& shape, std::int64_t capacity, Carver& carver);

  /// Starts over with the rows of `heads`, which have seen no key.
  void begin_rows(const HeadRows& heads);
  /// The scores of rows [row, row + count) against `tokens` tokens that all of them see.
  void fill(ScoreBlock& block, std::int64_t row, std::int64_t count, std::int64_t tokens) const;
  /// The output of a row, and its lse as result. `sink` joins the denominator of the output alone;
  /// kNoSink: nothing does.
  float finish_row(std::int64_t row, const Row& out, float sink) const;
  float* out_row(std::int64_t row) const { return out_ + row * out_stride_; }

  const Kernels& kernels_;
  const AttendShape shape_;
  const std::int64_t capacity_;  ///< Tokens of a tile.
  std::int64_t out_stride_;
  float* out_;      ///< [max rows][out_stride]
  float* row_max_;  ///< [max rows]
  float* row_sum_;  ///< [max rows]
  float* scores_;   ///< [kBlockRows / lanes][capacity][lanes]
  float* query_;    ///< [qk_channels]
};

/// Masks [count][capacity / 64] of rows [row, row + count) of `queries` over `keys`.
void fill_masks(const AttentionVariant& variant, const QueryRows& queries, std::int64_t row,
                std::int64_t count, const KeyInterval& keys, std::int64_t capacity,
                std::uint64_t* masks);

/// Calls attend(row, count, masks) for blocks of `queries` that see something of a tile: masks
/// [count][tile_tokens / 64] where a row does not see all of it, else nullptr.
template <std::int64_t tile_tokens, class Attend>
void for_each_block(const QueryRows& queries, const AttentionVariant& variant,
                    const KeyInterval& tile, const Attend& attend) {
  for (std::int64_t row = 0; row < queries.count; row += kBlockRows) {
    const std::int64_t count = std::min(kBlockRows, queries.count - row);
    const QueryInterval block{queries.query_of(row), queries.query_of(row + count - 1) + 1};
    switch (classify_tile(variant, block, tile, queries.extent)) {
      case TileVisibility::skipped:
        break;
      case TileVisibility::full:
        attend(row, count, nullptr);
        break;
      case TileVisibility::border: {
        std::uint64_t masks[kBlockRows * (tile_tokens / 64)];
        fill_masks(variant, queries, row, count, tile, tile_tokens, masks);
        attend(row, count, masks);
        break;
      }
    }
  }
}

/// Calls fn(tile, next tile, perhaps empty) for tiles of what `queries` see of `keys`. They end at
/// multiples of `tile_tokens`, wherever what is visible begins, so that a row's bits do not depend
/// on the rows beside it.
template <class F>
void for_each_tile(std::int64_t tile_tokens, const QueryRows& queries,
                   const AttentionVariant& variant, const KeyInterval& keys, const F& fn) {
  const QueryInterval all{queries.query_of(0), queries.query_of(queries.count - 1) + 1};
  const KeyInterval visible = intersect(keys, visible_to_any(variant, all, queries.extent));
  for (std::int64_t begin = visible.begin; begin < visible.end;) {
    const std::int64_t grid_end = (begin / tile_tokens + 1) * tile_tokens;
    const KeyInterval tile{begin, std::min(grid_end, visible.end)};
    fn(tile, KeyInterval{tile.end, std::min(tile.end + tile_tokens, visible.end)});
    begin = tile.end;
  }
}

/// All rows of `state` against those of `keys` that they see. `queries` are those of each head, and
/// reader_of(head).load(state, tile, next) gives the state keys and values i in [0, tile.size()),
/// at most State::kTokens, and asks for the memory of tile `next`, perhaps empty; it is never asked
/// for a key that no row sees. All heads take a tile before the next one: their rows lie next to
/// each other in memory.
template <class State, class ReaderOf>
void attend_keys(State& state, const HeadRows& heads, const QueryRows& queries,
                 const AttentionVariant& variant, const KeyInterval& keys,
                 const ReaderOf& reader_of) {
  for_each_tile(State::kTokens, queries, variant, keys, [&](const auto& tile, const auto& next) {
    // Keys go in groups of kTogether, from one on that no row sees if need be.
    const std::int64_t holes = tile.begin % State::kTogether;
    const KeyInterval whole{tile.begin - holes, tile.end};
    for (std::int64_t head = 0; head < heads.num_heads; ++head) {
      state.begin_tile(holes);
      reader_of(head).load(state, tile, next);
      for_each_block<State::kTokens>(
          queries, variant, whole,
          [&](std::int64_t row, std::int64_t count, const std::uint64_t* masks) {
            state.attend(head * heads.stride + row, count, whole.size(), masks);
          });
    }
  });
}

}  // namespace fovea::cpu
