// Measured limits of a GPU.
#pragma once

#include "fovea/machine_peaks.h"
#include "fovea/op_context.h"

namespace fovea::cuda {

/// Of any GPU: without a rate of bf16 products, whose instructions are each chip's own.
MachinePeaks measure_peaks(const OpContext& ctx);

/// Seconds of the fastest of a few runs of what `queue` puts on the context's stream. `queue` is
/// given that stream and a word of device memory to write to.
double best_seconds(const OpContext& ctx, void (*queue)(void* stream, float* sink));

namespace sm90 {

/// With a rate of bf16 products: of wgmma over operands in shared memory.
MachinePeaks measure_peaks(const OpContext& ctx);

}  // namespace sm90
}  // namespace fovea::cuda
