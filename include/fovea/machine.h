// What this machine can do at most, measured, to compare kernels with.
#pragma once

#include "fovea/op_context.h"

namespace fovea {

struct MachinePeaks {
  double f32_fma_gflops = 0;  ///< Independent fused multiply-adds in registers, all threads.
  /// Independent products of bf16 pairs added to f32, likewise; 0: the instruction set has none.
  double bf16_dot_gflops = 0;
  double read_gbps = 0;       ///< Streaming reads of memory larger than the caches, all threads.
};

/// With the context's threads and instruction set; a fraction of a second. Allocates. When the
/// machine is shared, measure before and after what is compared.
MachinePeaks measure_peaks(const OpContext& ctx);

}  // namespace fovea
