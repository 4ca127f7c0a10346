// Attention over keys and values in bf16, for instruction sets that multiply pairs of them.
#pragma once

#include "backends/cpu/attend.h"
#include "backends/cpu/float_state.h"

namespace fovea::cpu {

/// Queries, running softmax and sums of up to max_rows rows, and one tile of keys and values: where
/// they lie, or a copy, and their scales.
class PairState : public RowState {
 public:
  static constexpr std::int64_t kTokens = kPairTileTokens;
  static constexpr std::int64_t kTogether = 2;
  /// Of memory, aligned to Workspace::kAlignment.
  static std::int64_t bytes(const Kernels& kernels, const AttendShape& shape);
  PairState(const Kernels& kernels, const AttendShape& shape, std::byte* memory);

  /// Starts over with the rows of `heads`, which have seen no key. Then set_query for each.
  void begin(const HeadRows& heads);
  /// Takes the query buffer, whose values bf16 has exactly unless keys are int8.
  void set_query(std::int64_t row);

  /// Before the tokens of a tile, of which `holes`, 0 or 1, is missing in front: masks hide it.
  void begin_tile(std::int64_t holes) { holes_ = holes; }
  /// Whether keys are codes of int8, to be set as int16; values in them are, too. All else is bf16.
  bool int8_keys() const { return shape_.int8_keys; }
  /// Room for the codes of token `token`; 31 elements more may be written before the next token.
  std::byte* key_copy(std::int64_t token) { return k_copy_ + (holes_ + token) * k_stride_; }
  std::byte* value_copy(std::int64_t token) { return v_copy_ + (holes_ + token) * v_stride_; }
  /// The codes of a token, which must stay until the next tile, and the scale of each group.
  void set_key(std::int64_t token, const std::byte* codes, const float* scales);
  void set_value(std::int64_t token, const std::byte* codes, const float* scales);
  /// Rows to ask the memory for while this tile is worked on, for tokens from 0 on.
  void set_next_key(std::int64_t token, const std::byte* row) { next_keys_[token] = row; }
  void set_next_value(std::int64_t token, const std::byte* row) { next_values_[token] = row; }
  /// After the tokens of a tile: their number and that of the next.
  void finish_load(std::int64_t tokens, std::int64_t next_tokens);

  /// Rows [row, row + count), one block, against the first `tokens` of the tile, the hole included:
  /// those that `masks` [count][2] says; nullptr: all.
  void attend(std::int64_t row, std::int64_t count, std::int64_t tokens,
              const std::uint64_t* masks);
  float finish(std::int64_t row, const Row& out, float sink) const;

 private:
  PairState(const Kernels& kernels, const AttendShape& shape, Carver&& carver);
  void group_keys(std::int64_t tokens);
  /// Of the first values of the tile.
  bool has_finite_scales(std::int64_t tokens) const;

  std::int64_t k_stride_;  ///< In bytes.
  std::int64_t v_stride_;  ///< In bytes.
  std::int64_t pair_stride_;
  std::uint32_t* q_;        ///< As PairTile::q.
  float* q_steps_;          ///< As PairTile::q_steps.
  std::int16_t* q_codes_;   ///< [qk_channels]
  std::uint32_t* weights_;  ///< [kBlockRows / lanes][kTokens / 2][lanes]
  std::uint32_t* v_pairs_;  ///< [kTokens / 2][pair_stride]
  float* k_scales_;         ///< [ChannelGroups::kMax][kTokens]
  float* v_scales_;         ///< [ChannelGroups::kMax][kTokens]
  std::byte* k_copy_;       ///< [kTokens][k_stride]
  std::byte* v_copy_;       ///< [kTokens][v_stride]; nullptr when values are in the keys.
  std::int64_t used_;
  const std::byte* keys_[kTokens];
  const std::byte* values_[kTokens];
  const std::byte* next_keys_[kTokens];
  const std::byte* next_values_[kTokens];
  KeyGroup groups_[kTokens / kPairGroupTokens];
  std::int64_t holes_ = 0;
  bool has_next_ = false;
  bool v_is_finite_ = true;
};

}  // namespace fovea::cpu
