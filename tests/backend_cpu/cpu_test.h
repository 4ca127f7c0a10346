// Kernel tests run for every instruction set that this processor has.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/cpu/isa.h"
#include "backends/cpu/kernels.h"

namespace fovea::test {

inline std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : kIsas) {
    if (has_isa(isa)) isas.push_back(isa);
  }
  return isas;
}

class IsaTest : public ::testing::TestWithParam<Isa> {
 protected:
  const cpu::Kernels& kernels() const {
#if defined(__x86_64__)
    if (GetParam() == Isa::avx2) return cpu::avx2::kKernels;
    if (GetParam() == Isa::avx512) return cpu::avx512::kKernels;
    if (GetParam() == Isa::avx512_bf16) return cpu::avx512_bf16::kKernels;
#elif defined(__aarch64__)
    if (GetParam() == Isa::neon) return cpu::neon::kKernels;
#endif
    return cpu::scalar::kKernels;
  }
};

#define FOVEA_FOR_EACH_ISA(Suite)                                                \
  INSTANTIATE_TEST_SUITE_P(, Suite, ::testing::ValuesIn(available_isas()),       \
                           [](const ::testing::TestParamInfo<Isa>& param_info) { \
                             return std::string(name_of(param_info.param));      \
                           })

}  // namespace fovea::test
