// Checks that every planning call makes on the lengths it is given.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/check.h"
#include "fovea/attention_variant.h"

namespace fovea {

/// Throws unless `offsets` is [n + 1], starts at 0 and never decreases.
inline void check_offsets(std::string_view name, std::span<const std::int32_t> offsets) {
  FOVEA_CHECK(!offsets.empty(), invalid_argument,
              "{} is empty, must have one entry more than there are requests", name);
  FOVEA_CHECK(offsets[0] == 0, invalid_argument, "{}[0] is {}, must be 0", name, offsets[0]);
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    FOVEA_CHECK(offsets[i] >= offsets[i - 1], invalid_argument,
                "{}[{}] is {}, must be at least {}, the entry before it", name, i, offsets[i],
                offsets[i - 1]);
  }
}

inline void check_lengths(std::string_view name, std::span<const std::int32_t> lengths) {
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    FOVEA_CHECK(lengths[i] >= 0, invalid_argument, "{}[{}] is {}, must be at least 0", name, i,
                lengths[i]);
  }
}

inline void check_range(std::string_view name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
  FOVEA_CHECK(value >= least && value <= most, invalid_argument, "{} is {}, must be {} to {}", name,
              value, least, most);
}

inline void check_variant(const AttentionVariant& variant) {
  FOVEA_CHECK(variant.attention_chunk >= 0, invalid_argument,
              "variant.attention_chunk is {}, must be at least 0", variant.attention_chunk);
  FOVEA_CHECK(variant.attention_chunk == 0 || variant.causal, unsupported,
              "variant.attention_chunk is {} without causal, must be 0: chunks are causal",
              variant.attention_chunk);
  FOVEA_CHECK(variant.soft_cap >= 0 && std::isfinite(variant.soft_cap), invalid_argument,
              "variant.soft_cap is {}, must be finite and at least 0", variant.soft_cap);
}

}  // namespace fovea
