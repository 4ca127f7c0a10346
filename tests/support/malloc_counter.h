// Counts the heap allocations of the whole program, of any thread. Include in one file of a test
// program only: it replaces malloc.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
#define FOVEA_COUNTS_MALLOC 0  // Sanitizers replace malloc themselves, and __libc_* is glibc's.
#else
#define FOVEA_COUNTS_MALLOC 1
#endif

namespace fovea::test {

inline std::atomic<std::int64_t> malloc_calls{0};

/// Calls of malloc and its kin while fn runs; -1 where they cannot be counted.
template <class F>
std::int64_t count_mallocs(F&& fn) {
  const std::int64_t before = malloc_calls.load();
  fn();
  return FOVEA_COUNTS_MALLOC ? malloc_calls.load() - before : -1;
}

}  // namespace fovea::test

#if FOVEA_COUNTS_MALLOC
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) {
  ++fovea::test::malloc_calls;
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
  ++fovea::test::malloc_calls;
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, std::size_t bytes) {
  ++fovea::test::malloc_calls;
  return __libc_realloc(memory, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
  ++fovea::test::malloc_calls;
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  ++fovea::test::malloc_calls;
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  ++fovea::test::malloc_calls;
  *memory = __libc_memalign(alignment, bytes);
  return *memory != nullptr ? 0 : ENOMEM;
}
}
#endif
