// Matrices of 16-bit elements on their way to the products of one warp.
#pragma once

#include <cstdint>

#include "core/cuda_mma.cuh"

namespace fovea::cuda::ptx {

/// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8, and
/// gets elements 2 c and the next of row g of each.
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

/// As load_matrices; gets elements 2 c and the next of column g of each.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&m)[4],
                                                         std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

}  // namespace fovea::cuda::ptx
