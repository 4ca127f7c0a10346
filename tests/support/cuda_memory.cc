// Lets test programs hold a GPU's operands where they hold everybody's: the heap becomes memory
// that the GPU addresses, and every launch ends before its call returns, so that tests may read
// results at once. Linked into builds with CUDA; without a GPU nothing changes.
#include <cuda_runtime_api.h>
#include <malloc.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "support/poison.h"

namespace fovea::test {
namespace {

// The driver takes of it too: every kernel of cuBLASLt, loaded eagerly, is more than a gigabyte.
constexpr std::size_t kHeapBytes = std::size_t{4} << 30;

/// Begin and end of the heap's mapping.
std::pair<std::uintptr_t, std::uintptr_t> heap_range() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (!line.ends_with("[heap]")) continue;
    std::size_t dash = 0;
    const std::uintptr_t begin = std::stoul(line, &dash, 16);
    return {begin, std::stoul(line.substr(dash + 1), nullptr, 16)};
  }
  return {};
}

void share(void* memory, std::size_t bytes) {
  const cudaError_t status = cudaHostRegister(memory, bytes, 0);
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "cudaHostRegister: %s\n", cudaGetErrorString(status));
  std::abort();
}

bool give_heap_to_device() {
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // Or a first launch would allocate.
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return false;
  // One heap, grown once and for good, that all threads and sizes come from.
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);  // Never.
  void* volatile grown = std::malloc(kHeapBytes);  // volatile: or both calls vanish.
  std::free(grown);
  const auto [begin, end] = heap_range();
  if (end - begin < kHeapBytes) {  // Then malloc takes pieces from elsewhere.
    std::fprintf(stderr, "the heap has %zu bytes, must have %zu to be shared with the device\n",
                 end - begin, kHeapBytes);
    std::abort();
  }
  share(reinterpret_cast<void*>(begin), end - begin);
  device_hooks = {
      .fill =
          [](void* memory, std::byte value, std::int64_t bytes) {
            cudaMemset(memory, std::to_integer<int>(value), static_cast<std::size_t>(bytes));
          },
      .lend = [](void* memory,
                 std::int64_t bytes) { share(memory, static_cast<std::size_t>(bytes)); },
      .take_back = [](void* memory) { cudaHostUnregister(memory); }};
  return true;
}

[[maybe_unused]] const bool on_device = give_heap_to_device();

}  // namespace
}  // namespace fovea::test
