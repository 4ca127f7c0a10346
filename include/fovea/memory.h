// Devices, and where their memory comes from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fovea {

struct Device {
  enum class Type : std::uint8_t { cpu, cuda };
  Type type = Type::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// "the CPU", "CUDA device 0", for error texts.
std::string to_string(const Device& device);

/// The host's heap, or what a backend gives (OpContext::memory, OpContext::host_memory).
struct MemorySource {
  Device device;
  /// Throws Error(resource_exhausted) when there is none. Null: the host's heap.
  std::byte* (*allocate)(Device device, std::int64_t bytes) = nullptr;
  void (*free)(Device device, std::byte* memory) = nullptr;
  /// Between memory of the device and the host's, or within either: behind the work on `stream`,
  /// and done when it returns. Null: the host copies.
  void (*copy)(Device device, void* to, const void* from, std::int64_t bytes,
               void* stream) = nullptr;
  /// Returns when the work on `stream` is done. Null: calls end when theirs is.
  void (*wait)(Device device, void* stream) = nullptr;
};

/// With source.copy.
void copy_bytes(const MemorySource& source, void* to, const void* from, std::int64_t bytes,
                void* stream = nullptr);

}  // namespace fovea
