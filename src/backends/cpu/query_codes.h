// Where queries in fixed point lie for Kernels::score_int8_in_place.
//
// Rows of a head that are met at once (four, then two, then one) share vectors of 4 * lanes bytes,
// an equal part of each for every row. Groups of the keys follow each other, each from a vector on:
//
//   words   [vectors][rows][channels] int16, zeros behind the group's last; as many vectors as each
//           of the rows alone would fill
//   digits  [rows][words] int32, then [steps][2][rows][channels] int8, high digits before low ones:
//           code = 256 * high + low. The int32 are -128 times a row's sum of codes, then zeros:
//           such kernels take keys as code + 128.
#pragma once

#include <cstdint>

#include "backends/cpu/kernels.h"

namespace fovea::cpu {

/// Of int16, from a row to the next: room for `channels` in up to two groups, as keys of int8 have,
/// whichever these are, since scratch is sized before that is known.
std::int64_t query_code_stride(const Kernels& kernels, std::int64_t channels);

/// Puts the codes of row `row` of the `head_rows` of a head among those from `head` on, which are
/// `stride` apart.
void put_query_codes(const Kernels& kernels, const ChannelGroups& groups,
                     const std::int16_t* codes, std::int64_t row, std::int64_t head_rows,
                     std::int16_t* head, std::int64_t stride);

}  // namespace fovea::cpu
