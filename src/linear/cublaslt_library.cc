#include "linear/cublaslt_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace fovea::cuda {
namespace {

/// Sets `function` to the library's symbol of that name.
template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  FOVEA_CHECK(function != nullptr, unsupported, "libcublasLt has no {}: it must be of CUDA 13",
              name);
}

CublasLt load() {
  const char* forced = std::getenv("FOVEA_CUBLASLT");
  const std::string file =
      forced && *forced ? forced : "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fail(ErrorCode::unsupported,
         "products on a GPU need cuBLASLt, but {}; put its folder into LD_LIBRARY_PATH or its path "
         "into FOVEA_CUBLASLT",
         std::string(dlerror()));
  }
  CublasLt lt{};
  find(library, "cublasLtCreate", lt.create);
  find(library, "cublasLtGetStatusString", lt.status_string);
  find(library, "cublasLtMatmul", lt.matmul);
  find(library, "cublasLtMatmulAlgoGetHeuristic", lt.heuristic);
  find(library, "cublasLtMatmulDescSetAttribute", lt.set_desc);
  find(library, "cublasLtMatrixLayoutSetAttribute", lt.set_layout);
  find(library, "cublasLtMatmulPreferenceSetAttribute", lt.set_preference);
  find(library, "cublasLtMatmulDescInit_internal", lt.init_desc);
  find(library, "cublasLtMatrixLayoutInit_internal", lt.init_layout);
  find(library, "cublasLtMatmulPreferenceInit_internal", lt.init_preference);
  return lt;
}

}  // namespace

const CublasLt& CublasLt::get() {
  static const CublasLt lt = load();
  return lt;
}

cublasLtHandle_t CublasLt::handle(const Device& device) const {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;  // Live as long as the library.
  const std::lock_guard lock(mutex);
  cublasLtHandle_t& found = handles[device.index];
  if (found == nullptr) {
    const CurrentDevice current(device);
    check(create(&found), "cublasLtCreate");
  }
  return found;
}

}  // namespace fovea::cuda
