// Attention of query rows that share keys: what rows keep between tiles, tiles, and visibility.
//
// A state is one of two: FloatState takes keys and values as f32, PairState as bf16.
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
  bool values_in_keys = false;  ///< A value is the first v_channels of its key.
  float score_factor = 0.f;     ///< sm_scale * log2(e)
  float soft_cap = 0.f;         ///< Of the natural scores; 0: none.
  /// Rows of a query token: few leave the lanes of row vectors empty. It is the layer's, so that a
  /// row's bits do not depend on how many query tokens it is worked on with.
  std::int64_t rows_per_query = kMaxLanes;
  ChannelGroups k_groups;       ///< Of stored keys; PairState alone needs them and the next.
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
/// count of it. Heads start at whole vectors.
struct HeadRows {
  std::int64_t num_heads = 1;
  std::int64_t count = 0;
  std::int64_t stride = 0;
  static std::int64_t stride_of(std::int64_t count) {
    return (count + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  }
};

/// Whether lanes are better channels than rows: more than half of them would be empty.
inline bool has_few_rows(const Kernels& kernels, const AttendShape& shape) {
  return 2 * shape.rows_per_query <= kernels.lanes;
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

/// The rows of one head, from row `first` of the state on, against a tile that they see.
template <class State>
void attend_tile(State& state, std::int64_t first, const QueryRows& queries,
                 const AttentionVariant& variant, const KeyInterval& tile) {
  for (std::int64_t row = 0; row < queries.count; row += kBlockRows) {
    const std::int64_t count = std::min(kBlockRows, queries.count - row);
    const QueryInterval block{queries.query_of(row), queries.query_of(row + count - 1) + 1};
    switch (classify_tile(variant, block, tile, queries.extent)) {
      case TileVisibility::skipped:
        break;
      case TileVisibility::full:
        state.attend(first + row, count, tile.size(), nullptr);
        break;
      case TileVisibility::border: {
        std::uint64_t masks[kBlockRows * (State::kTokens / 64)];
        fill_masks(variant, queries, row, count, tile, State::kTokens, masks);
        state.attend(first + row, count, tile.size(), masks);
        break;
      }
    }
  }
}

/// All rows of `state` against those of `keys` that they see. `queries` are those of each head, and
/// reader_of(head).load(state, tile, next) gives the state keys and values i in [0, tile.size()),
/// at most State::kTokens, and asks for the memory of tile `next`, perhaps empty; it is never asked
/// for a key that no row sees. All heads take a tile before the next one: their rows lie next to
/// each other in memory. Tiles end at multiples of State::kTokens, wherever what is visible begins,
/// so that a row's bits do not depend on the rows beside it.
template <class State, class ReaderOf>
void attend_keys(State& state, const HeadRows& heads, const QueryRows& queries,
                 const AttentionVariant& variant, const KeyInterval& keys,
                 const ReaderOf& reader_of) {
  const QueryInterval all{queries.query_of(0), queries.query_of(queries.count - 1) + 1};
  const KeyInterval visible = intersect(keys, visible_to_any(variant, all, queries.extent));
  for (std::int64_t begin = visible.begin; begin < visible.end;) {
    const std::int64_t grid_end = (begin / State::kTokens + 1) * State::kTokens;
    const KeyInterval tile{begin, std::min(grid_end, visible.end)};
    const KeyInterval next{tile.end, std::min(tile.end + State::kTokens, visible.end)};
    // Keys go in groups of kTogether, from one on that no row sees if need be.
    const std::int64_t holes = begin % State::kTogether;
    for (std::int64_t head = 0; head < heads.num_heads; ++head) {
      state.begin_tile(holes);
      reader_of(head).load(state, tile, next);
      attend_tile(state, head * heads.stride, queries, variant, {begin - holes, tile.end});
    }
    begin = tile.end;
  }
}

}  // namespace fovea::cpu
