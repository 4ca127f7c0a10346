// cuBLASLt, found when it is first needed.
#pragma once

#include <cublasLt.h>

#include "core/cuda_device.h"

namespace fovea::cuda {

/// The functions that products call. libcublasLt is half a gigabyte, and only who runs a model on a
/// GPU needs it: so nothing links it, and the kernels alone work without. FOVEA_CUBLASLT names the
/// file where the loader would not find it.
struct CublasLt {
  /// Throws Error(unsupported) that says what was looked for.
  static const CublasLt& get();

  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescSetAttribute) set_desc;
  decltype(&cublasLtMatrixLayoutSetAttribute) set_layout;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  // What the header's inline functions of these names, less "_internal", call. They fill
  // descriptors in place, so that a product allocates none.
  decltype(&cublasLtMatmulDescInit_internal) init_desc;
  decltype(&cublasLtMatrixLayoutInit_internal) init_layout;
  decltype(&cublasLtMatmulPreferenceInit_internal) init_preference;

  void check(cublasStatus_t status, const char* what) const {
    FOVEA_CHECK(status == CUBLAS_STATUS_SUCCESS, device_failed, "{}: {}", what,
                status_string(status));
  }
  /// One for all products on a device; of any thread.
  cublasLtHandle_t handle(const Device& device) const;
};

}  // namespace fovea::cuda
