#include "fovea/machine.h"

#include "backends/cpu/peak.h"

namespace fovea {

MachinePeaks measure_peaks(const OpContext& ctx) { return cpu::measure_peaks(ctx); }

}  // namespace fovea
