#include "case_limits.h"

namespace fovea::cli {

const char* name_of(Limit limit) {
  switch (limit) {
    case Limit::f32_fma:
      return "f32 FMA";
    case Limit::bf16_dot:
      return "bf16 dot products";
    case Limit::read:
      return "read bandwidth";
  }
  return "";
}

double limit_us(Limit limit, const cases::Work& work, const MachinePeaks& peaks) {
  switch (limit) {
    case Limit::f32_fma:
      return work.flops / peaks.f32_fma_gflops * 1e-3;
    case Limit::bf16_dot:
      return work.flops / peaks.bf16_dot_gflops * 1e-3;
    case Limit::read:
      break;
  }
  return work.bytes / peaks.read_gbps * 1e-3;
}

Limit arithmetic_limit(const cases::CaseLine& line, const MachinePeaks& peaks) {
  const bool has_dot = line.dtype() == DType::bf16 && peaks.bf16_dot_gflops > 0;
  return has_dot ? Limit::bf16_dot : Limit::f32_fma;
}

Limit longest_limit(const cases::CaseLine& line, const cases::Work& work,
                    const MachinePeaks& peaks) {
  const Limit arithmetic = arithmetic_limit(line, peaks);
  const bool reads = limit_us(Limit::read, work, peaks) >= limit_us(arithmetic, work, peaks);
  return reads ? Limit::read : arithmetic;
}

}  // namespace fovea::cli
