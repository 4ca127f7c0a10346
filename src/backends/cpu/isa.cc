#include "backends/cpu/isa.h"

namespace fovea {

bool has_isa(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return true;
#if defined(__x86_64__)
    // These answer for the operating system as well: it must save the wide registers.
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return has_isa(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case Isa::avx512_bf16:
      return has_isa(Isa::avx512) && __builtin_cpu_supports("avx512bf16") &&
             __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
    case Isa::neon:
      return true;
#endif
    default:
      return false;
  }
}

namespace {

/// AMD's processors multiply pairs of bf16 at the rate of f32 products, so that there are twice as
/// many. Intel's issue one vector of them every other cycle, a quarter of that: half of what f32
/// gives there.
bool has_fast_pairs() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

}  // namespace

Isa best_isa() {
  for (Isa isa : kIsas) {
    if (has_isa(isa) && (isa != Isa::avx512_bf16 || has_fast_pairs())) return isa;
  }
  return Isa::scalar;
}

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::neon:
      return "neon";
  }
  return "";
}

}  // namespace fovea
