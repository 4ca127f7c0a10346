// Instruction set levels that the kernels are built for.
#pragma once

#include <cstdint>
#include <string_view>

namespace fovea {

enum class Isa : std::uint8_t {
  scalar,       ///< What the compiler assumes of every processor; runs anywhere.
  avx2,         ///< AVX2, FMA and F16C.
  avx512,       ///< AVX-512 F, BW, DQ and VL.
  avx512_bf16,  ///< And BF16 and VNNI.
  neon,         ///< AArch64's Advanced SIMD, which all of them have.
};
/// From the highest level to the lowest.
inline constexpr Isa kIsas[] = {Isa::avx512_bf16, Isa::avx512, Isa::avx2, Isa::neon, Isa::scalar};

/// Whether this library has kernels for `isa` and this processor and system run them.
bool has_isa(Isa isa);
/// The level whose kernels are fastest here.
Isa best_isa();

std::string_view name_of(Isa isa);

}  // namespace fovea
