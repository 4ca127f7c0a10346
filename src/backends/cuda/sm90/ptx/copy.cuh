// The bulk tensor copy engine, and matrix stores to shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fovea::cuda::ptx {

/// What L2 should do with the lines that a copy touches.
enum class L2Policy : std::uint8_t { evict_first, evict_normal };

__device__ __forceinline__ std::uint64_t make_l2_policy(L2Policy policy) {
  std::uint64_t p;
  if (policy == L2Policy::evict_first) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p));
  }
  return p;
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Copies the box at (x, y, z) of `map` to shared memory; its bytes count on `barrier`.
__device__ __forceinline__ void load_box(std::uint32_t destination, const CUtensorMap* map, int x,
                                         int y, int z, std::uint32_t barrier,
                                         std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

/// As load_box, of a map with four dimensions.
__device__ __forceinline__ void load_box(std::uint32_t destination, const CUtensorMap* map, int x,
                                         int y, int z, int w, std::uint32_t barrier,
                                         std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(policy)
      : "memory");
}

/// Copies `bytes` contiguous bytes to shared memory; both ends and the count are multiples of 16.
__device__ __forceinline__ void load_bytes(std::uint32_t destination, const void* source,
                                           std::uint32_t bytes, std::uint32_t barrier,
                                           std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

/// Copies 8 bytes of global to shared memory.
__device__ __forceinline__ void copy_8_bytes(std::uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(destination), "l"(source)
               : "memory");
}

/// Arrives at `barrier` once this thread's copies so far are there; one of its expected arrivals.
__device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Copies 16 bytes of global to shared memory, or writes zeros where `exists` is false.
__device__ __forceinline__ void copy_piece(std::uint32_t destination, const void* source,
                                           bool exists) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}

/// As copy_piece, 8 bytes.
__device__ __forceinline__ void copy_half_piece(std::uint32_t destination, const void* source,
                                                bool exists) {
  const int bytes = exists ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}

/// Ends a group of this thread's copy_piece calls.
__device__ __forceinline__ void commit_pieces() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most `pending` of this thread's groups are unfinished.
template <int pending>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/// Waits for this thread's copy_piece calls.
__device__ __forceinline__ void wait_for_pieces() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Stores four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix
/// l / 8, and has elements 2 c and the next of row g of each.
__device__ __forceinline__ void store_matrices(std::uint32_t address,
                                               const std::uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

/// Stores four 8x8 matrices of 16-bit elements transposed: lane l gives the address of row l % 8 of
/// matrix l / 8 as it lies in memory.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t address, std::uint32_t a,
                                                          std::uint32_t b, std::uint32_t c,
                                                          std::uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

/// Transposes an 8x8 matrix of 16-bit elements that lies across a warp.
__device__ __forceinline__ std::uint32_t transpose_matrix(std::uint32_t fragment) {
  std::uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(fragment));
  return out;
}

}  // namespace fovea::cuda::ptx
