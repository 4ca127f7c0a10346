// Measured limits of the machine.
#pragma once

#include "fovea/machine.h"

namespace fovea::cpu {

/// By the kernels of the instruction set that `ctx` computes with; those of the reference backend
/// are scalar.
MachinePeaks measure_peaks(const OpContext& ctx);

}  // namespace fovea::cpu
