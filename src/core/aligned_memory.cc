#include "core/aligned_memory.h"

#include <new>

#include "core/check.h"

namespace fovea {

std::byte* allocate_aligned(std::int64_t bytes, std::string_view what) {
  const auto size = static_cast<std::size_t>(bytes > 0 ? bytes : 1);
  void* memory = ::operator new (size, std::align_val_t{kMemoryAlignment}, std::nothrow);
  FOVEA_CHECK(memory != nullptr, resource_exhausted, "{}: no memory for {} bytes", what, bytes);
  return static_cast<std::byte*>(memory);
}

void free_aligned(std::byte* memory) {
  ::operator delete (memory, std::align_val_t{kMemoryAlignment});
}

}  // namespace fovea
