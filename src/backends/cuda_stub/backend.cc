// What backends/cuda answers in a build without CUDA.
#include "backends/cuda/backend.h"

#include "core/check.h"

namespace fovea {

CudaDevice open_cuda_device(int) {
  fail(ErrorCode::unsupported,
       "backend is cuda, but this build is without CUDA; configure with -DFOVEA_CUDA=ON");
}

const Backend& cuda_backend(int) {
  static constexpr Backend kNone{};  // Nobody comes here: there is no device to open.
  return kNone;
}

MemorySource cuda_memory(int) { return {}; }
MemorySource cuda_host_memory(int) { return {}; }
std::shared_ptr<void> make_cuda_stream(int) { return nullptr; }

}  // namespace fovea
