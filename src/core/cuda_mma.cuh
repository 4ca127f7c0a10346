// Matrix products of one warp: D[16, 8] += A[16, 16] B[16, 8], all in registers.
//
// Lane l holds, with g = l / 4 and c = l % 4: of A, a[0] and a[1] at K 2 c and the next of rows g
// and g + 8, a[2] and a[3] at K 2 c + 8 and the next; of B, b0 at K 2 c and the next of column g,
// b1 at 2 c + 8 and the next; of D, d[0, 1] columns 2 c and the next of row g, d[2, 3] those of row
// g + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fovea::cuda::ptx {

template <typename T>
__device__ __forceinline__ void mma(float* d, const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace fovea::cuda::ptx
