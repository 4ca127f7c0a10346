// Attention over keys and values that were converted to f32: any operands, any instruction set.
#pragma once

#include "backends/cpu/attend.h"

namespace fovea::cpu {

/// Queries, running softmax and sums of up to max_rows rows, and one tile of keys and values.
class FloatState : public RowState {
 public:
  static constexpr std::int64_t kTokens = kTileTokens;
  static constexpr std::int64_t kTogether = 1;
  /// Of memory, aligned to Workspace::kAlignment.
  static std::int64_t bytes(const Kernels& kernels, const AttendShape& shape);
  FloatState(const Kernels& kernels, const AttendShape& shape, std::byte* memory);

  /// Starts over with the rows of `heads`, which have seen no key. Then set_query for each.
  void begin(const HeadRows& heads);
  /// Takes the query buffer.
  void set_query(std::int64_t row);

  void begin_tile(std::int64_t) {}
  /// Where token `token` of a tile goes, token by token from 0 on: each may write 15 elements more.
  float* key(std::int64_t token) { return k_ + token * k_stride_; }
  float* value(std::int64_t token) { return v_ + token * v_stride_; }

  /// Rows [row, row + count), one block, against the first `tokens` of the tile: those that `masks`
  /// [count][1] says; nullptr: all.
  void attend(std::int64_t row, std::int64_t count, std::int64_t tokens,
              const std::uint64_t* masks);
  float finish(std::int64_t row, const Row& out, float sink) const {
    return finish_row(row, out, sink);
  }

 private:
  FloatState(const Kernels& kernels, const AttendShape& shape, Carver&& carver);

  std::int64_t k_stride_;
  std::int64_t v_stride_;
  float* q_;  ///< As AttendTile::q.
  float* k_;  ///< [kTokens][k_stride]
  float* v_;  ///< [kTokens][v_stride]; k_ when values are in the keys.
  std::int64_t used_;
};

}  // namespace fovea::cpu
