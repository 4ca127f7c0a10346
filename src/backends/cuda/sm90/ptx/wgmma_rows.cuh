// Warpgroup matrix products with 64 query rows on the M side: scores from operands in shared
// memory, and outputs whose A operand (probabilities) is in registers. Fragments of D as in
// wgmma.cuh.
#pragma once

#include "backends/cuda/sm90/ptx/wgmma.cuh"

namespace fovea::cuda::ptx {

/// As swizzled_operand, for B with contiguous N (rows count K) in chunks of 64 columns that lie
/// `chunk_bytes` apart.
__device__ __forceinline__ std::uint64_t swizzled_columns(std::uint32_t address,
                                                          std::uint32_t chunk_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (std::uint64_t{chunk_bytes >> 4} << 16) |
         ((address & 0x3ffff) >> 4);
}

// Operands of the statements below: 8, 32, 64 or 128 accumulators, and how the template names them.
#define FOVEA_D8(d, i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FOVEA_D32(d) FOVEA_D8(d, 0), FOVEA_D8(d, 8), FOVEA_D8(d, 16), FOVEA_D8(d, 24)
#define FOVEA_D64(d) \
  FOVEA_D32(d), FOVEA_D8(d, 32), FOVEA_D8(d, 40), FOVEA_D8(d, 48), FOVEA_D8(d, 56)
#define FOVEA_D4X32(d) FOVEA_D32(d[0]), FOVEA_D32(d[1]), FOVEA_D32(d[2]), FOVEA_D32(d[3])
#define FOVEA_NAMES_32                                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "   \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FOVEA_NAMES_64                                                                      \
  FOVEA_NAMES_32                                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOVEA_NAMES_128                                                                     \
  FOVEA_NAMES_64                                                                            \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "   \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "    \
  "%126, %127"
#define FOVEA_SCORES_128(type)                                                \
  "{\n"                                                                      \
  ".reg .pred p;\n"                                                          \
  "setp.ne.b32 p, %66, 0;\n"                                                 \
  "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type "\n"          \
  "{" FOVEA_NAMES_64 "}, %64, %65, p, 1, 1, 0, 0;\n"                         \
  "}\n"
#define FOVEA_OUTPUTS_OF_SHARED(type)                                     \
  "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type "\n"       \
  "{" FOVEA_NAMES_128 "}, %128, %129, 1, 1, 1, 0, 1;\n"
#define FOVEA_OUTPUTS(type, columns, d_names, a, b)                            \
  "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type "\n"    \
  "{" d_names "}, {" a "}, " b ", 1, 1, 1, 1;\n"

/// D += A B^T, or D = A B^T unless `accumulate`: rows of A [64, 16] and B [kColumns, 16] have
/// contiguous K.
template <typename T, int kColumns>
__device__ __forceinline__ void wgmma_scores(float (&d)[kColumns / 2], std::uint64_t a,
                                             std::uint64_t b, bool accumulate) {
  static_assert(kColumns == 64 || kColumns == 128);
  [[maybe_unused]] const int scale = accumulate ? 1 : 0;
  if constexpr (kColumns == 64) {
    wgmma<T, AMajor::k, 64>(d, a, b, accumulate);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(FOVEA_SCORES_128("bf16")
                 : FOVEA_D64(d)
                 : "l"(a), "l"(b), "r"(scale));
  } else {
    asm volatile(FOVEA_SCORES_128("f16")
                 : FOVEA_D64(d)
                 : "l"(a), "l"(b), "r"(scale));
  }
}

/// D += A B: A [64, 16] in registers (thread t holds, of its rows g and g + 8, a[0] and a[1] at K
/// 2 c and the next, a[2] and a[3] at 2 c + 8 and the next), B [16, kColumns] of swizzled_columns.
template <typename T, int kColumns>
__device__ __forceinline__ void wgmma_outputs(float (&d)[kColumns / 2], const std::uint32_t (&a)[4],
                                              std::uint64_t b) {
  static_assert(kColumns == 64 || kColumns == 128);
  if constexpr (kColumns == 64 && std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(FOVEA_OUTPUTS("bf16", "64", FOVEA_NAMES_32, "%32, %33, %34, %35", "%36")
                 : FOVEA_D32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else if constexpr (kColumns == 64) {
    asm volatile(FOVEA_OUTPUTS("f16", "64", FOVEA_NAMES_32, "%32, %33, %34, %35", "%36")
                 : FOVEA_D32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(FOVEA_OUTPUTS("bf16", "128", FOVEA_NAMES_64, "%64, %65, %66, %67", "%68")
                 : FOVEA_D64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(FOVEA_OUTPUTS("f16", "128", FOVEA_NAMES_64, "%64, %65, %66, %67", "%68")
                 : FOVEA_D64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

/// As above for 256 columns, whose accumulators are four chunks of 64 columns.
template <typename T>
__device__ __forceinline__ void wgmma_outputs_256(float (&d)[4][32], const std::uint32_t (&a)[4],
                                                  std::uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(FOVEA_OUTPUTS("bf16", "256", FOVEA_NAMES_128, "%128, %129, %130, %131", "%132")
                 : FOVEA_D4X32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(FOVEA_OUTPUTS("f16", "256", FOVEA_NAMES_128, "%128, %129, %130, %131", "%132")
                 : FOVEA_D4X32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

/// As above with A [64, 16] in shared memory: its rows have contiguous K.
template <typename T>
__device__ __forceinline__ void wgmma_outputs_256(float (&d)[4][32], std::uint64_t a,
                                                  std::uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(FOVEA_OUTPUTS_OF_SHARED("bf16") : FOVEA_D4X32(d) : "l"(a), "l"(b));
  } else {
    asm volatile(FOVEA_OUTPUTS_OF_SHARED("f16") : FOVEA_D4X32(d) : "l"(a), "l"(b));
  }
}

#undef FOVEA_D8
#undef FOVEA_D32
#undef FOVEA_D64
#undef FOVEA_D4X32
#undef FOVEA_NAMES_32
#undef FOVEA_NAMES_64
#undef FOVEA_NAMES_128
#undef FOVEA_SCORES_128
#undef FOVEA_OUTPUTS
#undef FOVEA_OUTPUTS_OF_SHARED

}  // namespace fovea::cuda::ptx
