// Cache-line aligned memory for tensors, workspaces and caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fovea/memory.h"

namespace fovea {

/// A cache line; also a full zmm register.
inline constexpr std::int64_t kMemoryAlignment = 64;

/// Uninitialised, never null; from 4 MiB on of huge pages where the system has them. Throws
/// Error(resource_exhausted) that names `what`.
std::byte* allocate_aligned(std::int64_t bytes, std::string_view what);
void free_aligned(std::byte* memory);

/// The same from `source`, and back to it.
std::byte* allocate(const MemorySource& source, std::int64_t bytes, std::string_view what);
void release(const MemorySource& source, std::byte* memory);

}  // namespace fovea
