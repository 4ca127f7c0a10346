// Plain loops with double accumulation, which read like the formulas and run anywhere.
#pragma once

#include "ops/backend.h"

namespace fovea {

const Backend& reference_backend();

}  // namespace fovea
