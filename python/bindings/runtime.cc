#include "runtime.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <utility>

#include "dlpack.h"
#include "fovea/error.h"

namespace fovea::python {

namespace nb = nanobind;

SharedRuntime::SharedRuntime(RuntimeOptions options)
    : pool_(make_openmp_thread_pool(options.num_threads)), process_(getpid()) {
  options.pool = pool_.get();
  runtime_ = std::make_unique<Runtime>(options);
}

SharedRuntime::~SharedRuntime() {
  if (belongs_here()) return;
  // A forked child has none of the threads that the pool would wait for.
  static_cast<void>(runtime_.release());
  static_cast<void>(pool_.release());
}

bool SharedRuntime::belongs_here() const { return process_ == getpid(); }

void SharedRuntime::check_process() const {
  if (belongs_here()) return;
  throw Error(ErrorCode::invalid_argument,
              "runtime was made in process " + std::to_string(process_) + ", and this is process " +
                  std::to_string(getpid()) +
                  ": its threads did not come along, so make a new fovea.Runtime here");
}

namespace {

/// Fills `runtime` at the first use, and again in a forked child. Never destroyed: who computes at
/// exit may still hold it.
SharedRuntime& made_here(SharedRuntime*& runtime, const RuntimeOptions& options) {
  if (!runtime || !runtime->belongs_here()) runtime = new SharedRuntime(options);
  return *runtime;
}

SharedRuntime& process_runtime() {
  static SharedRuntime* runtime = nullptr;
  return made_here(runtime, {});
}

}  // namespace

const SharedRuntime& cuda_runtime_of(int device, void* stream) {
  // A stream's own scratch memory: what is queued on two of them may run at once.
  static std::map<std::pair<int, void*>, SharedRuntime*> runtimes;
  return made_here(runtimes[{device, stream}], {.backend = "cuda",
                                                .num_threads = 1,
                                                .cuda_device = device,
                                                .cuda_stream = stream});
}

const SharedRuntime& runtime_of(nb::handle object) {
  if (object.is_none()) return process_runtime();
  if (nb::isinstance<SharedRuntime>(object)) return nb::cast<const SharedRuntime&>(object);
  throw nb::type_error(
      ("runtime is a " + name_of_type(object) + "; it must be a fovea.Runtime or None").c_str());
}

void bind_runtime(nb::module_& m) {
  nb::class_<SharedRuntime>(m, "Runtime", R"(Threads, scratch memory and the kernels of a device.

Calls from several Python threads wait for each other; the GIL is released while one computes. A
child process that was forked needs a runtime of its own. Calls that name no runtime take one of the
device that their tensors are on; on a GPU they are queued on the stream that the tensors' library
works on just then.

Args:
    backend: "auto" (the environment's FOVEA_BACKEND, else "cpu"), "cpu", "reference" or "cuda".
    isa: "auto" (FOVEA_ISA, else the best of this processor), "scalar", "avx2", "avx512",
        "avx512_bf16" or "neon"; of "cuda" "auto", or "plain": only the kernels of any GPU.
    num_threads: 0 takes the processors that this process may use.
    batch_invariant: the bits of a row depend on its own inputs alone, not on its batch mates or
        the number of threads.
    cuda_device: the GPU of "cuda".
    cuda_stream: the cudaStream_t as an integer (torch.cuda.Stream.cuda_stream) that calls are
        queued on; 0: the default stream. Tensors of other streams are waited for there; who reads
        results elsewhere waits for this stream. Borrowed.

Raises:
    ValueError: an unknown name or a negative number of threads.
    NotImplementedError: this processor lacks the isa, there is no such GPU, or this build has no
        CUDA.)")
      .def(
          "__init__",
          [](SharedRuntime* self, const std::string& backend, const std::string& isa,
             int num_threads, bool batch_invariant, int cuda_device, std::uintptr_t cuda_stream) {
            new (self) SharedRuntime({.backend = backend,
                                      .isa = isa,
                                      .num_threads = num_threads,
                                      .batch_invariant = batch_invariant,
                                      .cuda_device = cuda_device,
                                      .cuda_stream = reinterpret_cast<void*>(cuda_stream)});
          },
          nb::kw_only(), nb::arg("backend") = "auto", nb::arg("isa") = "auto",
          nb::arg("num_threads") = 0, nb::arg("batch_invariant") = false,
          nb::arg("cuda_device") = 0, nb::arg("cuda_stream") = 0)
      .def_prop_ro(
          "backend", [](const SharedRuntime& r) { return std::string(r.get().backend()); },
          "\"cpu\", \"reference\" or \"cuda\".")
      .def_prop_ro(
          "isa", [](const SharedRuntime& r) { return std::string(r.get().isa()); },
          "\"scalar\", \"avx2\", \"avx512\", \"avx512_bf16\" or \"neon\"; on a GPU \"sm_90\" or "
          "\"plain\".")
      .def_prop_ro(
          "num_threads", [](const SharedRuntime& r) { return r.get().num_threads(); },
          "Threads that compute.");
  m.def(
      "default_runtime", [] { return &process_runtime(); }, nb::rv_policy::reference,
      "The runtime of calls that name none: made at the first use, with all processors.");
}

}  // namespace fovea::python
