// The norm of one row.
#pragma once

#include <cstdint>

#include "backends/cpu/rows.h"
#include "fovea/ops.h"

namespace fovea::cpu {

/// To `out`, of x's dtype, which may be `x`; both have unit strides.
void norm_row(const Kernels& kernels, const Row& x, std::int64_t width, const TensorView& weight,
              float eps, const Row& out);

}  // namespace fovea::cpu
