// What a machine can do at most.
#pragma once

namespace fovea {

struct MachinePeaks {
  double f32_fma_gflops = 0;  ///< Independent fused multiply-adds in registers.
  /// Independent products of bf16 added to f32: of pairs on a CPU, of tiles on a GPU; 0: the
  /// instruction set has none, or none that is known here.
  double bf16_dot_gflops = 0;
  double read_gbps = 0;  ///< Streaming reads of memory larger than the caches.
};

}  // namespace fovea
