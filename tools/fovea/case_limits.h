// What bounds a case on a machine.
#pragma once

#include <cstdint>

#include "cases/problem.h"
#include "fovea/machine.h"

namespace fovea::cli {

enum class Limit : std::uint8_t { f32_fma, bf16_dot, read };

const char* name_of(Limit limit);

/// The least microseconds that `work` takes.
double limit_us(Limit limit, const cases::Work& work, const MachinePeaks& peaks);

/// Of a case's arithmetic.
Limit arithmetic_limit(const cases::CaseLine& line, const MachinePeaks& peaks);

/// Arithmetic or reading, whichever takes longer.
Limit longest_limit(const cases::CaseLine& line, const cases::Work& work,
                    const MachinePeaks& peaks);

}  // namespace fovea::cli
