// Stands in for src/backends/cpu and src/api/machine.cc where only the reference backend is built:
// "cpu" is the reference, of the scalar instruction set alone.
#include "backends/cpu/backend.h"
#include "backends/reference/backend.h"

namespace fovea {

bool has_isa(Isa isa) { return isa == Isa::scalar; }
Isa best_isa() { return Isa::scalar; }
std::string_view name_of(Isa isa) {
  return isa == Isa::scalar        ? "scalar"
         : isa == Isa::avx2        ? "avx2"
         : isa == Isa::avx512      ? "avx512"
         : isa == Isa::avx512_bf16 ? "avx512_bf16"
                                   : "neon";
}

const Backend* cpu_backend(Isa isa) { return has_isa(isa) ? &reference_backend() : nullptr; }

}  // namespace fovea
