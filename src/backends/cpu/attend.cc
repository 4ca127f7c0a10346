#include "backends/cpu/attend.h"

#include <cmath>
#include <limits>
#include <numbers>

#include "fovea/workspace.h"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// Floats from a row of n to the next: room for whole vectors from any element on, and an odd
/// number of cache lines. A power of two would put a column of rows into few sets of L1.
std::int64_t padded_stride(std::int64_t n) {
  return (round_up(n + kMaxLanes - 1, kMaxLanes) / kMaxLanes | 1) * kMaxLanes;
}

/// Hands out pieces of memory, or only counts them.
class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(memory) {}
  float* take(std::int64_t floats) {
    std::byte* piece = memory_ ? memory_ + used_ : nullptr;
    used_ += Workspace::rounded(floats * static_cast<std::int64_t>(sizeof(float)));
    return reinterpret_cast<float*>(piece);
  }
  std::int64_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::int64_t used_ = 0;
};

}  // namespace

std::int64_t AttendState::bytes(const AttendShape& shape) {
  const std::int64_t rows = round_up(shape.max_rows, kMaxLanes);
  Carver carver(nullptr);
  carver.take(rows * shape.qk_channels);
  carver.take(shape.max_rows * padded_stride(shape.v_channels));
  carver.take(rows);
  carver.take(rows);
  carver.take(kBlockRows * kTileTokens);
  carver.take(padded_stride(shape.qk_channels));
  carver.take(kTileTokens * padded_stride(shape.qk_channels));
  if (!shape.values_in_keys) carver.take(kTileTokens * padded_stride(shape.v_channels));
  return carver.used();
}

AttendState::AttendState(const Kernels& kernels, const AttendShape& shape, std::byte* memory)
    : kernels_(kernels),
      shape_(shape),
      k_stride_(padded_stride(shape.qk_channels)),
      v_stride_(shape.values_in_keys ? k_stride_ : padded_stride(shape.v_channels)),
      out_stride_(padded_stride(shape.v_channels)) {
  const std::int64_t rows = round_up(shape.max_rows, kMaxLanes);
  Carver carver(memory);
  q_ = carver.take(rows * shape.qk_channels);
  out_ = carver.take(shape.max_rows * out_stride_);
  row_max_ = carver.take(rows);
  row_sum_ = carver.take(rows);
  scores_ = carver.take(kBlockRows * kTileTokens);
  query_ = carver.take(k_stride_);
  k_ = carver.take(kTileTokens * k_stride_);
  v_ = shape.values_in_keys ? k_ : carver.take(kTileTokens * v_stride_);
}

void AttendState::begin(const HeadRows& heads) {
  const std::int64_t lanes = kernels_.lanes;
  for (std::int64_t head = 0; head < heads.num_heads; ++head) {
    const std::int64_t first = head * heads.stride;
    const std::int64_t padded = round_up(heads.count, lanes);
    std::fill_n(out_ + first * out_stride_, heads.count * out_stride_, 0.f);
    std::fill_n(row_max_ + first, padded, -kInfinity);
    std::fill_n(row_sum_ + first, padded, 0.f);
    // Lanes beyond the last row score 0 everywhere.
    const std::int64_t last_vector = (first + padded - lanes) * shape_.qk_channels;
    if (padded != heads.count) std::fill_n(q_ + last_vector, lanes * shape_.qk_channels, 0.f);
  }
}

void AttendState::set_query(std::int64_t row, float factor) {
  const std::int64_t lanes = kernels_.lanes;
  float* q = q_ + row / lanes * (shape_.qk_channels * lanes) + row % lanes;
  for (std::int64_t c = 0; c < shape_.qk_channels; ++c) q[c * lanes] = query_[c] * factor;
}

AttendTile AttendState::tile(std::int64_t row, std::int64_t count, const KeyInterval& keys) const {
  return {
      .q = q_ + row * shape_.qk_channels,
      .k = k_,
      .v = v_,
      .out = out_ + row * out_stride_,
      .row_max = row_max_ + row,
      .row_sum = row_sum_ + row,
      .scores = scores_,
      .row_mask = nullptr,
      .soft_cap = shape_.soft_cap * std::numbers::log2e_v<float>,
      .k_stride = k_stride_,
      .v_stride = v_stride_,
      .out_stride = out_stride_,
      .qk_channels = shape_.qk_channels,
      .v_channels = shape_.v_channels,
      .rows = count,
      .tokens = keys.size(),
  };
}

void AttendState::attend(std::int64_t row, std::int64_t count, const KeyInterval& keys) {
  kernels_.attend(tile(row, count, keys));
}

void AttendState::attend_border(std::int64_t first, std::int64_t row, std::int64_t count,
                                const KeyInterval& keys, const QueryRows& queries,
                                const AttentionVariant& variant) {
  std::uint64_t mask[kBlockRows];
  for (std::int64_t r = 0; r < count; ++r) {
    // Rows of a query token follow each other.
    const std::int64_t query = queries.query_of(row + r);
    const bool repeats = r > 0 && query == queries.query_of(row + r - 1);
    mask[r] = repeats ? mask[r - 1] : visible_bits(variant, query, keys, queries.extent);
  }
  AttendTile border = tile(first + row, count, keys);
  border.row_mask = mask;
  kernels_.attend(border);
}

float AttendState::finish(std::int64_t row, const Row& out, float sink) const {
  const float sum = row_sum_[row];
  const bool empty = sum == 0.f;
  float denominator = sum;
  if (sink != kNoSink) {
    denominator += std::exp2(sink * std::numbers::log2e_v<float> - row_max_[row]);
  }
  const float inverse = empty ? 0.f : 1.f / denominator;
  store_row(kernels_, out_ + row * out_stride_, inverse, shape_.v_channels, out);
  return empty ? -kInfinity : row_max_[row] * std::numbers::ln2_v<float> + std::log(sum);
}

}  // namespace fovea::cpu
