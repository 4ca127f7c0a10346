// CPU kernels by instruction set.
#pragma once

#include "backends/cpu/isa.h"
#include "ops/backend.h"

namespace fovea {

/// nullptr when this processor lacks `isa`.
const Backend* cpu_backend(Isa isa);

}  // namespace fovea
