// Rows of attention's output as codes and scales.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fovea/dtype.h"

namespace fovea {

/// Values of an nvfp4 group.
inline constexpr std::int64_t kNvfp4Group = 16;
/// Tiles of nvfp4's scales: rows and groups.
inline constexpr std::int64_t kNvfp4TileRows = 128;
inline constexpr std::int64_t kNvfp4TileGroups = 4;

inline constexpr float kSmallestAmax = 1e-10f;
/// amax of the group, at least kSmallestAmax, over 448; rounded up to a power of two on request.
/// What the published per-group quantisation of activations does.
float fp8_group_scale(std::span<const float> group, bool power_of_two);

/// One group of 16 as eight bytes of f4e2m1 codes; returns the f8e4m3fn bits of its scale, amax / 6
/// over `scale`. value = code * group scale * scale.
std::uint8_t encode_nvfp4_group(std::span<const float> group, float scale,
                                std::span<std::byte> codes);

/// Byte of row `row`, group `group` among scales of `groups` groups in tiles of 128 x 4.
constexpr std::int64_t nvfp4_scale_offset(std::int64_t row, std::int64_t group,
                                          std::int64_t groups) {
  const std::int64_t tiles = (groups + kNvfp4TileGroups - 1) / kNvfp4TileGroups;  // In a row.
  const std::int64_t tile = row / kNvfp4TileRows * tiles + group / kNvfp4TileGroups;
  const std::int64_t r = row % kNvfp4TileRows;
  return tile * kNvfp4TileRows * kNvfp4TileGroups + r % 32 * 16 + r / 32 * 4 +
         group % kNvfp4TileGroups;
}

}  // namespace fovea
