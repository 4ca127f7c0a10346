// Attention of query rows that share keys: tiles, visibility, and the state between tiles.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "backends/cpu/kernels.h"
#include "backends/cpu/rows.h"
#include "variants/visibility.h"

namespace fovea::cpu {

/// Rows that are worked on together share each tile's conversion to f32. Beyond this many that
/// saves nothing more, and their queries and sums would only take memory (2.4 MB for 576 and 512
/// channels).
inline constexpr std::int64_t kMaxRows = 512;

/// A sink of no weight.
inline constexpr float kNoSink = -std::numeric_limits<float>::infinity();

struct AttendShape {
  std::int64_t qk_channels = 0;
  std::int64_t v_channels = 0;
  std::int64_t max_rows = 0;    ///< At most kMaxRows.
  bool values_in_keys = false;  ///< A value is the first v_channels of its key.
  float soft_cap = 0.f;         ///< Of the natural scores; 0: none.
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

/// Queries, running softmax and sums of up to max_rows rows, and one tile of keys and values.
class AttendState {
 public:
  /// Of memory, aligned to Workspace::kAlignment.
  static std::int64_t bytes(const AttendShape& shape);
  AttendState(const Kernels& kernels, const AttendShape& shape, std::byte* memory);

  /// Starts over with the rows of `heads`, which have seen no key. Then set_query for each.
  void begin(const HeadRows& heads);
  /// Room for a row's qk_channels, to be filled before set_query.
  float* query_buffer() { return query_; }
  /// The buffer times `factor`, which holds log2(e).
  void set_query(std::int64_t row, float factor);

  /// Where token `token` of a tile goes, token by token from 0 on: each may write 15 elements more.
  float* key(std::int64_t token) { return k_ + token * k_stride_; }
  float* value(std::int64_t token) { return v_ + token * v_stride_; }

  /// Rows [row, row + count), one block, against the tile, whose tokens are `keys`.
  void attend(std::int64_t row, std::int64_t count, const KeyInterval& keys);
  /// The same for rows [row, row + count) of a head whose first is row `first` of the state, where
  /// the element rule says which of the keys each row sees.
  void attend_border(std::int64_t first, std::int64_t row, std::int64_t count,
                     const KeyInterval& keys, const QueryRows& queries,
                     const AttentionVariant& variant);

  /// The output of a row, and its lse as result. `sink` joins the denominator of the output alone;
  /// kNoSink: nothing does.
  float finish(std::int64_t row, const Row& out, float sink) const;

 private:
  AttendTile tile(std::int64_t row, std::int64_t count, const KeyInterval& keys) const;

  const Kernels& kernels_;
  AttendShape shape_;
  std::int64_t k_stride_;
  std::int64_t v_stride_;
  std::int64_t out_stride_;
  float* q_;        ///< [max rows / lanes][qk_channels][lanes]
  float* out_;      ///< [max rows][out_stride]
  float* row_max_;  ///< [max rows]
  float* row_sum_;  ///< [max rows]
  float* scores_;   ///< [kBlockRows / lanes][kTileTokens][lanes]
  float* query_;    ///< [qk_channels]
  float* k_;        ///< [kTileTokens][k_stride]
  float* v_;        ///< [kTileTokens][v_stride]; k_ when values are in the keys.
};

/// The rows of one head, from row `first` of the state on, against a tile that they see.
inline void attend_tile(AttendState& state, std::int64_t first, const QueryRows& queries,
                        const AttentionVariant& variant, const KeyInterval& tile) {
  for (std::int64_t row = 0; row < queries.count; row += kBlockRows) {
    const std::int64_t count = std::min(kBlockRows, queries.count - row);
    const QueryInterval block{queries.query_of(row), queries.query_of(row + count - 1) + 1};
    switch (classify_tile(variant, block, tile, queries.extent)) {
      case TileVisibility::skipped:
        break;
      case TileVisibility::full:
        state.attend(first + row, count, tile);
        break;
      case TileVisibility::border:
        state.attend_border(first, row, count, tile, queries, variant);
        break;
    }
  }
}

/// All rows of `state` against those of `keys` that they see. `queries` are those of each head, and
/// reader_of(head).load(state, tile) fills key(i) and value(i) for i in [0, tile.size()), at most
/// kTileTokens; it is never asked for a key that no row sees. Its prefetch(tile) comes one tile
/// ahead. All heads take a tile before the next one: their rows lie next to each other in memory.
template <class ReaderOf>
void attend_keys(AttendState& state, const HeadRows& heads, const QueryRows& queries,
                 const AttentionVariant& variant, const KeyInterval& keys,
                 const ReaderOf& reader_of) {
  const QueryInterval all{queries.query_of(0), queries.query_of(queries.count - 1) + 1};
  const KeyInterval visible = intersect(keys, visible_to_any(variant, all, queries.extent));
  for (std::int64_t begin = visible.begin; begin < visible.end; begin += kTileTokens) {
    const KeyInterval tile{begin, std::min(begin + kTileTokens, visible.end)};
    for (std::int64_t head = 0; head < heads.num_heads; ++head) {
      const auto& reader = reader_of(head);
      reader.load(state, tile);
      reader.prefetch({tile.end, std::min(tile.end + kTileTokens, visible.end)});
      attend_tile(state, head * heads.stride, queries, variant, tile);
    }
  }
}

}  // namespace fovea::cpu
