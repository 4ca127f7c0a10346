#include "backends/cpu/in_place_state.h"

#include <bit>

#include "backends/cpu/formats/codes.h"
#include "backends/cpu/query_codes.h"
#include "kv/formats/per_token/codec.h"

namespace fovea::cpu {

void InPlaceRows::finish_load(const KvFormat& format, std::int64_t tokens) {
  head_bytes_ = format.head_bytes();
  stored_ = format.scales == KvScales::none
                ? static_cast<int>(format.dtype)
                : kNumComputeDTypes + static_cast<int>(codes_of(format.dtype));
  scale_ = format.scale;
  if (format.scales == KvScales::per_token) {
    // An empty first group has a scale all the same.
    scales_at_ = kv_per_token::element_bytes(format) + (format.first_group > 0 ? 0 : 4);
  }
  // Kernels take whole register tiles.
  std::fill(rows_ + tokens, rows_ + kTileTokens, rows_[tokens - 1]);
}

StoredRows InPlaceRows::from_head(std::int64_t head, std::int64_t channels,
                                  const ChannelGroups& groups) const {
  return {.rows = rows_,
          .head_at = head * head_bytes_,
          .head_bytes = head_bytes_,
          .scales_at = scales_at_,
          .scale = scale_,
          .channels = channels,
          .groups = groups};
}

std::int64_t InPlaceState::stride_of(std::int64_t count) {
  if (count >= kMaxLanes) return HeadRows::stride_of(count);
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
}

InPlaceState::InPlaceState(const Kernels& kernels, const AttendShape& shape, Carver&& carver)
    : RowState(kernels, shape, kTokens, carver),
      q_stride_(padded_stride(shape.qk_channels, sizeof(float))),
      q_code_stride_(query_code_stride(kernels, shape.qk_channels)) {
  // Of one size for keys of any format: layers size their workspace before they see the cache.
  q_ = carver.take<float>(shape.max_rows * std::max(q_stride_, (q_code_stride_ + 1) / 2));
  q_codes_ = reinterpret_cast<std::int16_t*>(q_);
  q_steps_ = carver.take<float>(shape.max_rows);
  fixed_query_ = carver.take<std::int16_t>(shape.qk_channels);
  used_ = carver.used();
}

InPlaceState::InPlaceState(const Kernels& kernels, const AttendShape& shape, std::byte* memory)
    : InPlaceState(kernels, shape, Carver(memory)) {}

std::int64_t InPlaceState::bytes(const Kernels& kernels, const AttendShape& shape) {
  return InPlaceState(kernels, shape, Carver(nullptr)).used_;
}

void InPlaceState::begin(const HeadRows& heads) {
  heads_ = heads;
  begin_rows({.count = heads.num_heads * heads.stride});
  // Rows behind a head's last have scores that go nowhere, but are numbers.
  std::fill_n(scores_, kBlockRows * capacity_, 0.f);
}

void InPlaceState::set_query(std::int64_t row) {
  const std::int64_t channels = shape_.qk_channels;
  if (shape_.int8_keys) return set_fixed_query(row);
  float* q = q_ + row * q_stride_;
  const std::int64_t lanes = kernels_.lanes, bundle = 2 * lanes;
  const std::int64_t bundled = shape_.bf16_keys ? channels / bundle * bundle : 0;
  for (std::int64_t c = 0; c < channels; ++c) {
    const std::int64_t in_bundle = c % bundle / 2 + c % 2 * lanes;
    q[c < bundled ? c / bundle * bundle + in_bundle : c] = query_[c] * shape_.score_factor;
  }
  std::fill(q + channels, q + q_stride_, 0.f);
}

void InPlaceState::set_fixed_query(std::int64_t row) {
  const ChannelGroups& groups = shape_.k_groups;
  const float step = to_fixed_point(query_, shape_.qk_channels, groups.widest(), fixed_query_);
  q_steps_[row] = shape_.score_factor * step;
  const std::int64_t in_head = row % heads_.stride;
  put_query_codes(kernels_, groups, fixed_query_, in_head, heads_.count,
                  q_codes_ + (row - in_head) * q_code_stride_, q_code_stride_);
}

void InPlaceState::attend_tile(const HeadRows& heads, const QueryRows& queries,
                               const AttentionVariant& variant, const KeyInterval& tile) {
  const std::int64_t together = std::max<std::int64_t>(kBlockRows / heads.stride, 1);
  bool asks = true;  // The first block asks for what comes.
  for_each_block<kTokens>(
      queries, variant, tile,
      [&](std::int64_t row, std::int64_t count, const std::uint64_t* masks) {
        for (std::int64_t head = 0; head < heads.num_heads; head += together) {
          attend(heads, head, std::min(together, heads.num_heads - head), row, count, tile.size(),
                 masks, asks);
        }
        asks = false;
      });
}

void InPlaceState::attend(const HeadRows& heads, std::int64_t head, std::int64_t num_heads,
                          std::int64_t row, std::int64_t count, std::int64_t tokens,
                          const std::uint64_t* masks, bool asks) {
  const std::int64_t first = head * heads.stride + row;
  InPlaceTile tile;
  fill(tile, first, num_heads == 1 ? count : num_heads * heads.stride, tokens);
  std::uint64_t row_masks[kBlockRows] = {};
  if (masks) {
    for (std::int64_t h = 0; h < num_heads; ++h) {
      std::copy_n(masks, count, row_masks + h * heads.stride);
    }
    tile.row_mask = row_masks;
  }
  tile.q = q_ + first * q_stride_;
  tile.q_codes = q_codes_ + first * q_code_stride_;
  tile.q_steps = q_steps_ + first;
  tile.out = out_row(first);
  tile.k = keys_.from_head(head, shape_.qk_channels, shape_.k_groups);
  if (shape_.values_in_keys) {
    tile.v = keys_.from_head(head, shape_.v_channels, shape_.v_groups);
  } else {
    tile.v = values_.from_head(head, shape_.v_channels, shape_.v_groups);
  }
  tile.asks_for_values = asks && !shape_.values_in_keys;
  tile.next_keys = asks ? next_keys_ : nullptr;
  tile.num_next_keys = num_next_keys_;
  tile.heads = num_heads;
  tile.head_rows = count;
  tile.head_stride = heads.stride;
  tile.q_stride = q_stride_;
  tile.q_code_stride = q_code_stride_;
  tile.out_stride = out_stride_;
  alignas(64) float correction[kBlockRows];
  const auto score = shape_.int8_keys ? kernels_.score_int8_in_place
                                      : kernels_.score_in_place[keys_.stored()];
  score(tile);
  kernels_.weigh(tile, correction);
  const int values = shape_.values_in_keys ? keys_.stored() : values_.stored();
  const auto add = shape_.int8_values ? kernels_.add_int8_in_place : kernels_.add_in_place[values];
  add(tile, correction);
}

}  // namespace fovea::cpu
