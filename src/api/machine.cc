#include "fovea/machine.h"

#include "backends/cpu/peak.h"
#include "ops/backend.h"

namespace fovea {

MachinePeaks measure_peaks(const OpContext& ctx) {
  const Backend* first = ctx.backends.empty() ? nullptr : ctx.backends.front();
  if (first != nullptr && first->measure_peaks != nullptr) return first->measure_peaks(ctx);
  return {.f32_fma_gflops = cpu::f32_fma_gflops(ctx),
          .bf16_dot_gflops = cpu::bf16_dot_gflops(ctx),
          .read_gbps = cpu::read_gbps(ctx)};
}

}  // namespace fovea
