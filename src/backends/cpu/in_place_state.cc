#include "backends/cpu/in_place_state.h"

#include <bit>

#include "backends/cpu/formats/codes.h"
#include "kv/formats/per_token/codec.h"

namespace fovea::cpu {

void InPlaceRows::finish_load(const KvFormat& format, std::int64_t tokens,
                              std::int64_t next_tokens) {
  head_bytes_ = format.head_bytes();
  stored_ = format.scales == KvScales::none
                ? static_cast<int>(format.dtype)
                : kNumComputeDTypes + static_cast<int>(codes_of(format.dtype));
  load_scales(format, tokens);
  // Kernels take whole register tiles.
  std::fill(rows_ + tokens, rows_ + kTileTokens, rows_[tokens - 1]);
  has_next_ = next_tokens > 0;
  if (has_next_) std::fill(next_ + next_tokens, next_ + kTileTokens, next_[next_tokens - 1]);
}

void InPlaceRows::load_scales(const KvFormat& format, std::int64_t tokens) {
  if (format.scales == KvScales::per_tensor) {
    std::fill_n(scales_, num_heads_ * kTileTokens, format.scale);
  }
  if (format.scales != KvScales::per_token) return;
  // An empty group has a scale in the row, but no place here.
  const int first = format.first_group > 0 ? 0 : 1;
  const int last = format.first_group < format.head_elements() ? 1 : 0;
  const std::int64_t count = last - first + 1;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t head = 0; head < num_heads_; ++head) {
      const std::byte* bytes = rows_[t] + head * head_bytes_;
      for (int g = first; g <= last; ++g) {
        scales_[(head * count + g - first) * kTileTokens + t] =
            kv_per_token::load_scale(format, bytes, g);
      }
    }
  }
}

StoredRows InPlaceRows::from_head(std::int64_t head, std::int64_t channels,
                                  const ChannelGroups& groups) const {
  return {.rows = rows_,
          .next_rows = has_next_ ? next_ : nullptr,
          .scales = scales_ + head * groups.count * kTileTokens,
          .head_at = head * head_bytes_,
          .head_bytes = head_bytes_,
          .channels = channels,
          .groups = groups};
}

std::int64_t InPlaceState::stride_of(std::int64_t count) {
  if (count >= kMaxLanes) return HeadRows::stride_of(count);
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
}

InPlaceState::InPlaceState(const Kernels& kernels, const AttendShape& shape, Carver&& carver)
    : RowState(kernels, shape, kTokens, carver),
      q_stride_(padded_stride(shape.qk_channels, sizeof(float))) {
  q_ = carver.take<float>(shape.max_rows * q_stride_);
  k_scales_ = carver.take<float>(InPlaceRows::num_scales(shape.max_heads));
  v_scales_ = shape.values_in_keys
                  ? nullptr
                  : carver.take<float>(InPlaceRows::num_scales(shape.max_heads));
  used_ = carver.used();
}

InPlaceState::InPlaceState(const Kernels& kernels, const AttendShape& shape, std::byte* memory)
    : InPlaceState(kernels, shape, Carver(memory)) {}

std::int64_t InPlaceState::bytes(const Kernels& kernels, const AttendShape& shape) {
  return InPlaceState(kernels, shape, Carver(nullptr)).used_;
}

void InPlaceState::begin(const HeadRows& heads) {
  begin_rows({.count = heads.num_heads * heads.stride});
  // Rows behind a head's last have scores that go nowhere, but are numbers.
  std::fill_n(scores_, kBlockRows * capacity_, 0.f);
  keys_.begin(heads.num_heads, k_scales_);
  values_.begin(heads.num_heads, v_scales_);
}

void InPlaceState::set_query(std::int64_t row) {
  float* q = q_ + row * q_stride_;
  for (std::int64_t c = 0; c < shape_.qk_channels; ++c) q[c] = query_[c] * shape_.score_factor;
  std::fill(q + shape_.qk_channels, q + q_stride_, 0.f);
}

void InPlaceState::attend_tile(const HeadRows& heads, const QueryRows& queries,
                               const AttentionVariant& variant, const KeyInterval& tile) {
  const std::int64_t together = std::max<std::int64_t>(kBlockRows / heads.stride, 1);
  for_each_block<kTokens>(
      queries, variant, tile,
      [&](std::int64_t row, std::int64_t count, const std::uint64_t* masks) {
        for (std::int64_t head = 0; head < heads.num_heads; head += together) {
          attend(heads, head, std::min(together, heads.num_heads - head), row, count, tile.size(),
                 masks);
        }
        keys_.forget_next();
        values_.forget_next();
      });
}

void InPlaceState::attend(const HeadRows& heads, std::int64_t head, std::int64_t num_heads,
                          std::int64_t row, std::int64_t count, std::int64_t tokens,
                          const std::uint64_t* masks) {
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
  tile.out = out_row(first);
  tile.k = keys_.from_head(head, shape_.qk_channels, shape_.k_groups);
  if (shape_.values_in_keys) {
    tile.v = keys_.from_head(head, shape_.v_channels, shape_.v_groups);
    tile.v.next_rows = nullptr;
  } else {
    tile.v = values_.from_head(head, shape_.v_channels, shape_.v_groups);
  }
  tile.heads = num_heads;
  tile.head_rows = count;
  tile.head_stride = heads.stride;
  tile.q_stride = q_stride_;
  tile.out_stride = out_stride_;
  const int values = shape_.values_in_keys ? keys_.stored() : values_.stored();
  alignas(64) float correction[kBlockRows];
  kernels_.score_in_place[keys_.stored()](tile);
  kernels_.weigh(tile, correction);
  kernels_.add_in_place[values](tile, correction);
}

}  // namespace fovea::cpu
