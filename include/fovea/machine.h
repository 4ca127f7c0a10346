// What this machine can do at most, measured, to compare kernels with.
#pragma once

#include "fovea/machine_peaks.h"
#include "fovea/op_context.h"

namespace fovea {

/// With all of the context's threads and its instruction set, or on its GPU; a fraction of a
/// second. Allocates, on a GPU 2 GiB of its memory. When the machine is shared, measure before and
/// after what is compared.
MachinePeaks measure_peaks(const OpContext& ctx);

}  // namespace fovea
