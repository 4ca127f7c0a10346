#include "backends/cpu/pair_state.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace fovea::cpu {
namespace {

/// Of keys and values: bf16 or int16.
constexpr std::int64_t kElement = 2;

}  // namespace

PairState::PairState(const Kernels& kernels, const AttendShape& shape, Carver&& carver)
    : RowState(kernels, shape, kTokens, carver),
      k_stride_(padded_stride(shape.qk_channels, kElement) * kElement),
      v_stride_(padded_stride(shape.v_channels, kElement) * kElement),
      pair_stride_(padded_stride(shape.v_channels, sizeof(std::uint32_t))) {
  q_ = carver.take<std::uint32_t>(HeadRows::stride_of(shape.max_rows) * shape.qk_channels / 2);
  q_steps_ = carver.take<float>(HeadRows::stride_of(shape.max_rows));
  q_codes_ = carver.take<std::int16_t>(shape.qk_channels);
  weights_ = carver.take<std::uint32_t>(kBlockRows * kTokens / 2);
  v_pairs_ = carver.take<std::uint32_t>(kTokens / 2 * pair_stride_);
  k_scales_ = carver.take<float>(ChannelGroups::kMax * kTokens);
  v_scales_ = carver.take<float>(ChannelGroups::kMax * kTokens);
  k_copy_ = carver.take<std::byte>(kTokens * k_stride_);
  v_copy_ = shape.values_in_keys ? nullptr : carver.take<std::byte>(kTokens * v_stride_);
  used_ = carver.used();
}

PairState::PairState(const Kernels& kernels, const AttendShape& shape, std::byte* memory)
    : PairState(kernels, shape, Carver(memory)) {}

std::int64_t PairState::bytes(const Kernels& kernels, const AttendShape& shape) {
  return PairState(kernels, shape, Carver(nullptr)).used_;
}

void PairState::begin(const HeadRows& heads) {
  begin_rows(heads);
  if (heads.count % kernels_.lanes == 0) return;
  // Lanes beyond the last row score 0 everywhere.
  const std::int64_t vector = kernels_.lanes * shape_.qk_channels / 2;
  for (std::int64_t head = 0; head < heads.num_heads; ++head) {
    const std::int64_t last = head * heads.stride + heads.count;
    std::fill_n(q_ + last / kernels_.lanes * vector, vector, 0u);
    std::fill_n(q_steps_ + last / kernels_.lanes * kernels_.lanes, kernels_.lanes, 0.f);
  }
}

void PairState::set_query(std::int64_t row) {
  const std::int64_t lanes = kernels_.lanes, pairs = shape_.qk_channels / 2;
  std::uint32_t* q = q_ + row / lanes * (pairs * lanes) + row % lanes;
  if (shape_.int8_keys) {
    q_steps_[row] = to_fixed_point(query_, shape_.qk_channels, shape_.k_groups.widest(), q_codes_);
    for (std::int64_t p = 0; p < pairs; ++p) {
      std::memcpy(q + p * lanes, q_codes_ + 2 * p, sizeof *q);
    }
    return;
  }
  for (std::int64_t p = 0; p < pairs; ++p) {
    const auto first = std::bit_cast<std::uint32_t>(query_[2 * p]) >> 16;
    const auto second = std::bit_cast<std::uint32_t>(query_[2 * p + 1]) & 0xffff0000u;
    q[p * lanes] = second | first;
  }
}

void PairState::set_key(std::int64_t token, const std::byte* codes, const float* scales) {
  keys_[holes_ + token] = codes;
  for (int g = 0; g < shape_.k_groups.count; ++g) {
    k_scales_[g * kTokens + holes_ + token] = scales[g] * shape_.score_factor;
  }
  if (shape_.values_in_keys) set_value(token, codes, scales);
}

void PairState::set_value(std::int64_t token, const std::byte* codes, const float* scales) {
  values_[holes_ + token] = codes;
  for (int g = 0; g < shape_.v_groups.count; ++g) {
    v_scales_[g * kTokens + holes_ + token] = scales[g];
  }
}

void PairState::finish_load(std::int64_t tokens, std::int64_t next_tokens) {
  if (holes_ > 0) {
    keys_[0] = keys_[1];
    values_[0] = nullptr;
    for (int g = 0; g < shape_.v_groups.count; ++g) v_scales_[g * kTokens] = 0.f;
  }
  const PairKernels& pairs = *kernels_.pairs;
  const auto pack = shape_.int8_keys && shape_.values_in_keys ? pairs.pack_int16_values
                                                              : pairs.pack_values;
  v_is_finite_ = pack(values_, holes_ + tokens, shape_.v_channels, pair_stride_, v_pairs_);
  group_keys(holes_ + tokens);
  has_next_ = next_tokens > 0;
  for (std::int64_t t = next_tokens; has_next_ && t < kTokens; ++t) {
    next_keys_[t] = next_keys_[next_tokens - 1];
    next_values_[t] = next_values_[next_tokens - 1];
  }
}

/// Groups whose rows do not lie at one stride, and one that is not whole, go to the copy. What lies
/// there behind the last token is scored, but nobody looks at it.
void PairState::group_keys(std::int64_t tokens) {
  for (std::int64_t t = 0; t < tokens; t += kPairGroupTokens) {
    const std::byte* const* rows = keys_ + t;
    const auto address = [&](std::int64_t i) { return std::bit_cast<std::intptr_t>(rows[i]); };
    const std::int64_t count = std::min(kPairGroupTokens, tokens - t);
    bool even = count == kPairGroupTokens;
    const std::intptr_t step = even ? address(1) - address(0) : 0;
    for (std::int64_t i = 2; even && i < count; ++i) even = address(i) - address(i - 1) == step;
    KeyGroup& group = groups_[t / kPairGroupTokens];
    if (even) {
      group = {rows[0], step};
      continue;
    }
    std::byte* copy = k_copy_ + t * k_stride_;
    group = {copy, k_stride_};
    for (std::int64_t i = 0; i < count; ++i, copy += k_stride_) {
      if (rows[i] == copy) continue;
      std::memcpy(copy, rows[i], static_cast<std::size_t>(shape_.qk_channels * kElement));
    }
  }
}

bool PairState::has_finite_scales(std::int64_t tokens) const {
  for (int g = 0; g < shape_.v_groups.count; ++g) {
    const float* scales = v_scales_ + g * kTokens;
    if (!std::all_of(scales, scales + tokens, [](float s) { return std::isfinite(s); })) {
      return false;
    }
  }
  return true;
}

void PairState::attend(std::int64_t row, std::int64_t count, std::int64_t tokens,
                       const std::uint64_t* masks) {
  PairTile tile;
  fill(tile, row, count, tokens);
  tile.row_mask = masks;
  tile.q = q_ + row * shape_.qk_channels / 2;
  tile.q_steps = shape_.int8_keys ? q_steps_ + row : nullptr;
  tile.k = groups_;
  tile.k_scales = k_scales_;
  tile.v = v_pairs_;
  tile.v_scales = v_scales_;
  tile.weights = weights_;
  tile.out = out_row(row);
  tile.next_keys = has_next_ ? next_keys_ : nullptr;
  tile.next_values = shape_.values_in_keys ? nullptr : next_values_;
  tile.k_groups = shape_.k_groups;
  tile.v_groups = shape_.v_groups;
  tile.v_stride = pair_stride_;
  tile.out_stride = out_stride_;
  tile.qk_channels = shape_.qk_channels;
  tile.v_channels = shape_.v_channels;
  tile.v_is_finite = v_is_finite_ && (masks == nullptr || has_finite_scales(tile.tokens));
  kernels_.pairs->attend(tile);
  has_next_ = false;  // The first block has asked.
}

float PairState::finish(std::int64_t row, const Row& out, float sink) const {
  kernels_.pairs->restore_channels(shape_.v_channels, out_row(row));
  return finish_row(row, out, sink);
}

}  // namespace fovea::cpu
