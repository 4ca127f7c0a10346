#include "backends/cpu/attend.h"

#include <cmath>
#include <numbers>

#include "fovea/workspace.h"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace

std::byte* Carver::take_bytes(std::int64_t bytes) {
  std::byte* piece = memory_ ? memory_ + used_ : nullptr;
  used_ += Workspace::rounded(bytes);
  return piece;
}

std::int64_t padded_stride(std::int64_t n, std::int64_t element_bytes) {
  constexpr std::int64_t kCacheLine = 64;
  const std::int64_t line = kCacheLine / element_bytes;
  // Kernels write whole vectors, of two times kMaxLanes at most, from the last of them on.
  return (round_up(n + line - 1, 2 * kMaxLanes) / line | 1) * line;
}

float to_fixed_point(const float* x, std::int64_t n, std::int64_t summed, std::int16_t* codes) {
  float largest = 0.f;
  bool finite = true;
  for (std::int64_t i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::abs(x[i]));
  }
  if (!finite || largest == 0.f) {
    std::fill_n(codes, n, std::int16_t{0});
    return finite ? 0.f : std::numeric_limits<float>::quiet_NaN();
  }
  constexpr std::int64_t kMaxSum = std::numeric_limits<std::int32_t>::max() / 128;
  constexpr std::int64_t kTwoDigits = 127 * 256 + 127;  // Both signed, of 8 bits.
  const auto limit = static_cast<double>(std::min(kTwoDigits, kMaxSum / summed));
  const double factor = limit / static_cast<double>(largest);
  for (std::int64_t i = 0; i < n; ++i) {
    codes[i] = static_cast<std::int16_t>(std::lrint(static_cast<double>(x[i]) * factor));
  }
  return static_cast<float>(static_cast<double>(largest) / limit);
}

RowState::RowState(const Kernels& kernels, const AttendShape& shape, std::int64_t capacity,
                   Carver& carver)
    : kernels_(kernels),
      shape_(shape),
      capacity_(capacity),
      out_stride_(padded_stride(shape.v_channels, sizeof(float))) {
  const std::int64_t rows = round_up(shape.max_rows, kMaxLanes);
  out_ = carver.take<float>(shape.max_rows * out_stride_);
  row_max_ = carver.take<float>(rows);
  row_sum_ = carver.take<float>(rows);
  scores_ = carver.take<float>(kBlockRows * capacity);
  query_ = carver.take<float>(padded_stride(shape.qk_channels, sizeof(float)));
}

void RowState::begin_rows(const HeadRows& heads) {
  for (std::int64_t head = 0; head < heads.num_heads; ++head) {
    const std::int64_t first = head * heads.stride;
    const std::int64_t padded = round_up(heads.count, kernels_.lanes);
    std::fill_n(out_row(first), heads.count * out_stride_, 0.f);
    std::fill_n(row_max_ + first, padded, -kInfinity);
    std::fill_n(row_sum_ + first, padded, 0.f);
  }
}

void RowState::fill(ScoreBlock& block, std::int64_t row, std::int64_t count,
                    std::int64_t tokens) const {
  block.scores = scores_;
  block.row_max = row_max_ + row;
  block.row_sum = row_sum_ + row;
  block.row_mask = nullptr;
  block.soft_cap = shape_.soft_cap * std::numbers::log2e_v<float>;
  block.capacity = capacity_;
  block.rows = count;
  block.tokens = tokens;
}

float RowState::finish_row(std::int64_t row, const Row& out, float sink) const {
  const float sum = row_sum_[row];
  const bool empty = sum == 0.f;
  const float lse =
      empty ? -kInfinity : row_max_[row] * std::numbers::ln2_v<float> + std::log(sum);
  const float inverse = empty ? 0.f : 1.f / sum;
  if (sink == kNoSink) {
    store_row(kernels_, out_row(row), inverse, shape_.v_channels, out);
    return lse;
  }
  // As a merge of this partial alone would: a row's bits are the same with empty partials beside.
  float* values = out_row(row);
  for (std::int64_t c = 0; c < shape_.v_channels; ++c) values[c] *= inverse;
  const float left = empty ? 0.f : 1.f / (1.f + std::exp(sink - lse));
  store_row(kernels_, values, left, shape_.v_channels, out);
  return lse;
}

void fill_masks(const AttentionVariant& variant, const QueryRows& queries, std::int64_t row,
                std::int64_t count, const KeyInterval& keys, std::int64_t capacity,
                std::uint64_t* masks) {
  const std::int64_t words = capacity / 64;
  for (std::int64_t r = 0; r < count; ++r) {
    std::uint64_t* mask = masks + r * words;
    // Rows of a query token follow each other.
    const std::int64_t query = queries.query_of(row + r);
    const bool repeats = r > 0 && query == queries.query_of(row + r - 1);
    for (std::int64_t w = 0; 64 * w < keys.size(); ++w) {
      const std::int64_t begin = keys.begin + 64 * w;
      const KeyInterval word{begin, std::min(begin + 64, keys.end)};
      mask[w] = repeats ? mask[w - words] : visible_bits(variant, query, word, queries.extent);
    }
  }
}

}  // namespace fovea::cpu
