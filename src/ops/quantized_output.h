// Checks of a quantised output, for the op and for layers that write one at their end.
#pragma once

#include <cstdint>

#include "fovea/ops.h"

namespace fovea {

/// Throws Error(invalid_argument) that names what does not fit `tokens` rows of `width` channels:
/// all but what the output shares memory with.
void check_quantized_output(const QuantizedOutput& output, std::int64_t tokens, std::int64_t width);

}  // namespace fovea
