// The OCP microscaling format MXFP4: groups of 32 f4e2m1 codes under one f8e8m0 scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fovea/dtype.h"

namespace fovea {

inline constexpr std::int64_t kMxfp4Group = 32;

/// The power of two that takes the largest finite magnitude of `group` into [3.5, 7): all but what
/// then exceeds 6 by less than half a step rounds to a code. (The specification's own suggestion,
/// 2^(floor(log2(amax)) - 2), cuts up to a quarter off.) NaN when a value is NaN: f4e2m1 has none.
Float8E8M0 mxfp4_scale(std::span<const float> group);

/// Codes of the group, two per byte, low nibble first; returns their scale. With a scale of NaN the
/// codes are zero.
Float8E8M0 encode_mxfp4_group(std::span<const float> group, std::span<std::byte> codes);

}  // namespace fovea
