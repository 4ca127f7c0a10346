// Descriptors of the bulk tensor copy engine.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace fovea::cuda {

/// The driver's encoder; null when it has none. The driver is not linked: it is asked for.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)
               : nullptr;
  }();
  return encoder;
}

}  // namespace fovea::cuda
