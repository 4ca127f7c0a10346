// Groups of the latent with their scales, and the rope part.
#pragma once

#include <cstring>
#include <span>

#include "core/float_bits.h"
#include "fovea/quant.h"
#include "kv/formats/fp8_ds_mla/layout.h"
#include "quant/power_of_two.h"

namespace fovea::kv_fp8_ds_mla {

inline void encode_row(const KvFormat& format, std::span<const float> values,
                       std::span<std::byte> row) {
  for (std::int64_t g = 0; g < kLatent / kGroup; ++g) {
    const auto group = values.subspan(static_cast<std::size_t>(g * kGroup), kGroup);
    float scale = group_scale(DType::f8e4m3fn, group);
    if (format.power_of_two_scales) scale = power_of_two_above(scale);
    quantize_group(DType::f8e4m3fn, group, scale,
                   row.subspan(static_cast<std::size_t>(g * kGroup), kGroup));
    std::memcpy(row.data() + kScalesAt + g * std::int64_t{sizeof scale}, &scale, sizeof scale);
  }
  for (std::int64_t i = 0; i < kRope; ++i) {
    const auto value = narrow<BFloat16>(values[static_cast<std::size_t>(kLatent + i)]);
    std::memcpy(row.data() + kRopeAt + i * std::int64_t{sizeof value}, &value, sizeof value);
  }
}

inline float load_scale(const std::byte* row, std::int64_t group) {
  float scale;
  std::memcpy(&scale, row + kScalesAt + group * std::int64_t{sizeof scale}, sizeof scale);
  return scale;
}

inline void decode_row(std::span<const std::byte> row, std::span<float> values) {
  for (std::int64_t g = 0; g < kLatent / kGroup; ++g) {
    const auto first = static_cast<std::size_t>(g * kGroup);
    dequantize_group(DType::f8e4m3fn, row.subspan(first, kGroup), load_scale(row.data(), g),
                     values.subspan(first, kGroup));
  }
  for (std::int64_t i = 0; i < kRope; ++i) {
    BFloat16 value;
    std::memcpy(&value, row.data() + kRopeAt + i * std::int64_t{sizeof value}, sizeof value);
    values[static_cast<std::size_t>(kLatent + i)] = widen(value);
  }
}

}  // namespace fovea::kv_fp8_ds_mla
