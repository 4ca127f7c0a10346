// Groups of a head and their inline scales.
#pragma once

#include <cstring>
#include <span>

#include "fovea/quant.h"
#include "kv/formats/per_token/layout.h"

namespace fovea::kv_per_token {

/// The scale of group `group`, 0 or 1. Heads have any width, so floats may lie at any address.
inline float load_scale(const KvFormat& format, const std::byte* head, int group) {
  float scale;
  std::memcpy(&scale, head + element_bytes(format) + group * std::int64_t{sizeof scale},
              sizeof scale);
  return scale;
}

inline void encode_head(const KvFormat& format, std::span<const float> values,
                        std::span<std::byte> head) {
  const auto first = static_cast<std::size_t>(format.first_group);
  const auto split = static_cast<std::size_t>(bytes_of(format.dtype, format.first_group));
  const auto elements = static_cast<std::size_t>(element_bytes(format));
  const float scales[2] = {group_scale(format.dtype, values.first(first)),
                           group_scale(format.dtype, values.subspan(first))};
  quantize_group(format.dtype, values.first(first), scales[0], head.first(split));
  quantize_group(format.dtype, values.subspan(first), scales[1],
                 head.subspan(split, elements - split));
  std::memcpy(head.data() + elements, scales, sizeof scales);
}

inline void decode_head(const KvFormat& format, std::span<const std::byte> head,
                        std::span<float> values) {
  const auto first = static_cast<std::size_t>(format.first_group);
  const auto split = static_cast<std::size_t>(bytes_of(format.dtype, format.first_group));
  const auto elements = static_cast<std::size_t>(element_bytes(format));
  dequantize_group(format.dtype, head.first(split), load_scale(format, head.data(), 0),
                   values.first(first));
  dequantize_group(format.dtype, head.subspan(split, elements - split),
                   load_scale(format, head.data(), 1), values.subspan(first));
}

}  // namespace fovea::kv_per_token
