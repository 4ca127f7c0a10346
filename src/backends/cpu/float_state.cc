#include "backends/cpu/float_state.h"

namespace fovea::cpu {

FloatState::FloatState(const Kernels& kernels, const AttendShape& shape, Carver&& carver)
    : RowState(kernels, shape, kTokens, carver),
      k_stride_(padded_stride(shape.qk_channels, sizeof(float))),
      v_stride_(shape.values_in_keys ? k_stride_ : padded_stride(shape.v_channels, sizeof(float))) {
  q_ = carver.take<float>(HeadRows::stride_of(shape.max_rows) * shape.qk_channels);
  k_ = carver.take<float>(kTokens * k_stride_);
  v_ = shape.values_in_keys ? k_ : carver.take<float>(kTokens * v_stride_);
  used_ = carver.used();
}

FloatState::FloatState(const Kernels& kernels, const AttendShape& shape, std::byte* memory)
    : FloatState(kernels, shape, Carver(memory)) {}

std::int64_t FloatState::bytes(const Kernels& kernels, const AttendShape& shape) {
  return FloatState(kernels, shape, Carver(nullptr)).used_;
}

void FloatState::begin(const HeadRows& heads) {
  begin_rows(heads);
  if (heads.count % kernels_.lanes == 0) return;
  // Lanes beyond the last row score 0 everywhere.
  const std::int64_t vector = kernels_.lanes * shape_.qk_channels;
  for (std::int64_t head = 0; head < heads.num_heads; ++head) {
    const std::int64_t last = head * heads.stride + heads.count;
    std::fill_n(q_ + last / kernels_.lanes * vector, vector, 0.f);
  }
}

void FloatState::set_query(std::int64_t row) {
  const std::int64_t lanes = kernels_.lanes, channels = shape_.qk_channels;
  float* q = q_ + row / lanes * (channels * lanes) + row % lanes;
  for (std::int64_t c = 0; c < channels; ++c) q[c * lanes] = query_[c] * shape_.score_factor;
}

void FloatState::attend(std::int64_t row, std::int64_t count, std::int64_t tokens,
                        const std::uint64_t* masks) {
  AttendTile tile;
  fill(tile, row, count, tokens);
  tile.row_mask = masks;
  tile.q = q_ + row * shape_.qk_channels;
  tile.k = k_;
  tile.v = v_;
  tile.out = out_row(row);
  tile.k_stride = k_stride_;
  tile.v_stride = v_stride_;
  tile.out_stride = out_stride_;
  tile.qk_channels = shape_.qk_channels;
  tile.v_channels = shape_.v_channels;
  kernels_.attend(tile);
}

}  // namespace fovea::cpu
