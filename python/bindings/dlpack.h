// Tensors of other libraries as views, without copies.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "fovea/tensor.h"

namespace fovea::python {

namespace nb = nanobind;

enum class Access { read, write };

/// A view of an array of any library, and what must live as long as it is used besides the array.
struct ImportedTensor {
  TensorView view;
  nb::object owner;
  bool read_only = false;
  void* stream = nullptr;  ///< On a GPU: the cudaStream_t that has the elements ready.
};

/// Takes whatever has __dlpack__ (torch through its C table, which costs nanoseconds instead of
/// microseconds) and NumPy arrays, those of ml_dtypes included. Empty arrays get an address, so
/// that they are not taken for absent ones. On a GPU the elements are ready for what is queued on
/// `stream`; without one on the stream that the tensor's library works on just now, or on the
/// default stream where it does not say. Throws TypeError on what is no tensor or has a dtype
/// that fovea lacks, ValueError on what is read-only, misaligned or has too many dimensions,
/// Error(unsupported) on devices other than CPUs and NVIDIA GPUs; all name the argument.
ImportedTensor import_tensor(nb::handle object, const char* name, Access access,
                             std::optional<void*> stream = {});

/// The elements of a tensor on a GPU in host memory; waits for them. Throws as import_tensor.
ImportedTensor copy_to_host(nb::handle object, const char* name);

/// "torch.Tensor", for error texts.
std::string name_of_type(nb::handle object);

}  // namespace fovea::python
