// Measured limits of the machine, by the kernels of the instruction set that a context computes
// with; the reference backend's are scalar.
#pragma once

#include "fovea/op_context.h"

namespace fovea::cpu {

/// Independent fused multiply-adds in registers, all threads.
double f32_fma_gflops(const OpContext& ctx);
/// Independent products of bf16 pairs in registers, all threads; 0: the instruction set has none.
double bf16_dot_gflops(const OpContext& ctx);
/// Streaming reads of memory beyond the caches, all threads. Allocates that memory.
double read_gbps(const OpContext& ctx);

}  // namespace fovea::cpu
