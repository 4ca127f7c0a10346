// A device with its threads and scratch memory: the only place that knows all backends.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "fovea/op_context.h"

namespace fovea {

struct RuntimeOptions {
  /// "auto" (FOVEA_BACKEND, else "cpu"), "cpu", "reference" or "cuda".
  std::string backend = "auto";
  /// "auto" (FOVEA_ISA, else the fastest that this processor has), "scalar", "avx2", "avx512",
  /// "avx512_bf16" or "neon"; with "cuda": "auto", or "plain" for the kernels of any GPU alone.
  std::string isa = "auto";
  /// Borrowed; must outlive the runtime. Null: a std::thread pool of num_threads.
  ThreadPool* pool = nullptr;
  int num_threads = 0;  ///< 0: the processors that this process may use.
  /// Plans for this context cut work by each request alone, so that the bits which attention ops
  /// and merges give a row depend on its own inputs alone. Matrix products are not part of that.
  /// With "cuda" the kernels of any GPU alone promise that, and run.
  bool batch_invariant = false;
  int cuda_device = 0;  ///< The GPU of "cuda".
  /// "cuda": the cudaStream_t that ops are queued on; null: the default stream. Borrowed.
  void* cuda_stream = nullptr;
  /// "cuda": a stream of the runtime's own instead. DeviceGraph needs one that is not the default.
  bool own_cuda_stream = false;
  /// "cuda": slots, positions, lengths and blocks that only the device can read are checked there,
  /// before they are used. A bad slot is skipped, a row at a bad position left as it is or not
  /// appended, a request with a bad length or block sees nothing; take_device_fault() says what.
  bool check_device_indices = false;
};

/// Used by one thread at a time. Plans, geometry and layers are immutable and shared freely.
class Runtime {
 public:
  /// Throws Error(unsupported) when the processor lacks the forced isa, or when there is no GPU or
  /// kernel for "cuda"; Error(invalid_argument) on an unknown name.
  explicit Runtime(const RuntimeOptions& options = {});
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const OpContext& context() const;
  operator const OpContext&() const { return context(); }
  Workspace& workspace() const { return *context().workspace; }
  int num_threads() const { return context().pool->num_threads(); }
  std::string_view backend() const;  ///< "cpu", "reference" or "cuda".
  /// Of the cpu backend as in RuntimeOptions; "scalar" for reference; "sm_90", its like or "plain"
  /// for cuda.
  std::string_view isa() const;
  /// "NVIDIA H200, 132 multiprocessors, 139 GiB"; empty but for cuda.
  std::string_view device_name() const;
  /// What check_device_indices found first since the last call: "slot_mapping[3] is 99, but must be
  /// in [-1, 64)"; empty: nothing. Waits for the work that is queued.
  std::string take_device_fault() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// "AVX2 FMA F16C ...": what the processor has, of what matters here.
std::string cpu_features();

}  // namespace fovea
