// What everything that calls the CUDA runtime needs. Included in builds with CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include "core/check.h"
#include "fovea/workspace.h"

namespace fovea::cuda {

/// Throws Error(device_failed) that says what `what` answered.
inline void check(cudaError_t status, const char* what) {
  FOVEA_CHECK(status == cudaSuccess, device_failed, "{}: {}", what, cudaGetErrorString(status));
}

inline cudaStream_t stream_of(const ExecutionContext& ctx) {
  return static_cast<cudaStream_t>(ctx.stream);
}

/// Makes a device the calling thread's, for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(const Device& device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device.index) return;
    check(cudaSetDevice(device.index), "cudaSetDevice");
    changed_ = true;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace fovea::cuda
