// Attention of few rows per key head over keys and values where they lie.
#pragma once

#include "backends/cpu/attend.h"
#include "fovea/kv_format.h"

namespace fovea::cpu {

/// Keys or values of a tile: where each token's first head lies.
class InPlaceRows {
 public:
  /// Whether elements of `format` are of one kind.
  static bool takes(const KvFormat& format) { return format.scales != KvScales::ds_mla; }
  void set_row(std::int64_t token, const std::byte* first_head) { rows_[token] = first_head; }
  /// After the tokens of a tile. `format` knows its heads.
  void finish_load(const KvFormat& format, std::int64_t tokens);

  /// `channels` of heads from `head` on.
  StoredRows from_head(std::int64_t head, std::int64_t channels,
                       const ChannelGroups& groups) const;
  /// Index of the elements in the arrays of Kernels.
  int stored() const { return stored_; }

 private:
  std::int64_t head_bytes_ = 0;
  std::int64_t scales_at_ = -1;
  float scale_ = 1.f;
  int stored_ = 0;
  const std::byte* rows_[kTileTokens];
};

/// Queries, running softmax and sums of the rows of up to max_heads key heads.
class InPlaceState : public RowState {
 public:
  static constexpr std::int64_t kTokens = kTileTokens;
  /// From a head's rows to the next one's: register tiles of rows lie in one row vector.
  static std::int64_t stride_of(std::int64_t count);
  /// Of memory, aligned to Workspace::kAlignment.
  static std::int64_t bytes(const Kernels& kernels, const AttendShape& shape);
  InPlaceState(const Kernels& kernels, const AttendShape& shape, std::byte* memory);

  /// Starts over with the rows of `heads`, which have seen no key. Then set_query for each.
  void begin(const HeadRows& heads);
  /// Takes the query buffer.
  void set_query(std::int64_t row);

  InPlaceRows& keys() { return keys_; }
  /// Not where values are in the keys.
  InPlaceRows& values() { return values_; }
  /// Keys of the tile that comes next, of `count` tokens.
  void set_next_key(std::int64_t token, const std::byte* first_head) {
    next_keys_[token] = first_head;
  }
  void set_num_next_keys(std::int64_t count) { num_next_keys_ = count; }

  /// The heads' rows of a tile of `tokens` tokens that was loaded.
  void attend_tile(const HeadRows& heads, const QueryRows& queries,
                   const AttentionVariant& variant, const KeyInterval& tile);
  float finish(std::int64_t row, const Row& out, float sink) const {
    return finish_row(row, out, sink);
  }

 private:
  InPlaceState(const Kernels& kernels, const AttendShape& shape, Carver&& carver);
  void set_fixed_query(std::int64_t row);
  /// Rows [row, row + count) of each of `num_heads` heads. `masks` [count]; nullptr: all see all.
  /// `asks`: for the memory that is needed next.
  void attend(const HeadRows& heads, std::int64_t head, std::int64_t num_heads, std::int64_t row,
              std::int64_t count, std::int64_t tokens, const std::uint64_t* masks, bool asks);

  HeadRows heads_;
  std::int64_t q_stride_;
  std::int64_t q_code_stride_;
  float* q_;                   ///< [max_rows][q_stride]
  std::int16_t* q_codes_;      ///< As InPlaceTile::q_codes, in place of it.
  float* q_steps_;             ///< [max_rows]
  std::int16_t* fixed_query_;  ///< [qk_channels]
  std::int64_t used_;
  InPlaceRows keys_;
  InPlaceRows values_;
  const std::byte* next_keys_[kTokens];
  std::int64_t num_next_keys_ = 0;
};

/// As attend_keys of attend.h, but for reader_of(0).load(state, tile, next), which is of all heads.
template <class ReaderOf>
void attend_keys(InPlaceState& state, const HeadRows& heads, const QueryRows& queries,
                 const AttentionVariant& variant, const KeyInterval& keys,
                 const ReaderOf& reader_of) {
  for_each_tile(InPlaceState::kTokens, queries, variant, keys,
                [&](const KeyInterval& tile, const KeyInterval& next) {
                  reader_of(0).load(state, tile, next);
                  state.attend_tile(heads, queries, variant, tile);
                });
}

}  // namespace fovea::cpu
