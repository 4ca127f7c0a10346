#include "core/aligned_memory.h"

#include <cstdlib>
#include <cstring>

#include "core/check.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fovea {
namespace {

constexpr std::size_t kHugePage = 2 * 1024 * 1024;

std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// Blocks of a cache lie in random order: with pages of 4 KiB each costs walks of the page tables.
/// A system without huge pages refuses, and all is as before.
void ask_for_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
}

}  // namespace

std::byte* allocate_aligned(std::int64_t bytes, std::string_view what) {
  const auto wanted = static_cast<std::size_t>(bytes > 0 ? bytes : 1);
  const bool huge = wanted >= 2 * kHugePage;
  const std::size_t alignment = huge ? kHugePage : std::size_t{kMemoryAlignment};
  const std::size_t size = round_up(wanted, alignment);
  void* memory = size >= wanted ? std::aligned_alloc(alignment, size) : nullptr;
  FOVEA_CHECK(memory != nullptr, resource_exhausted, "{}: no memory for {} bytes", what, bytes);
  if (huge) ask_for_huge_pages(memory, size);
  return static_cast<std::byte*>(memory);
}

void free_aligned(std::byte* memory) { std::free(memory); }

std::byte* allocate(const MemorySource& source, std::int64_t bytes, std::string_view what) {
  if (source.allocate == nullptr) return allocate_aligned(bytes, what);
  return source.allocate(source.device, bytes > 0 ? bytes : 1);
}

void release(const MemorySource& source, std::byte* memory) {
  source.free ? source.free(source.device, memory) : free_aligned(memory);
}

std::string to_string(const Device& device) {
  if (device.type == Device::Type::cpu) return "the CPU";
  return "CUDA device " + std::to_string(device.index);
}

void copy_bytes(const MemorySource& source, void* to, const void* from, std::int64_t bytes,
                void* stream) {
  if (bytes == 0) return;
  if (source.copy) return source.copy(source.device, to, from, bytes, stream);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace fovea
