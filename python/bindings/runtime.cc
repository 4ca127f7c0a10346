#include "runtime.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <unistd.h>

#include "dlpack.h"
#include "fovea/error.h"

namespace fovea::python {

namespace nb = nanobind;

SharedRuntime::SharedRuntime(const std::string& backend, const std::string& isa, int num_threads)
    : pool_(make_openmp_thread_pool(num_threads)),
      runtime_(std::make_unique<Runtime>(
          RuntimeOptions{.backend = backend, .isa = isa, .pool = pool_.get()})),
      process_(getpid()) {}

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

/// Made at the first use; a forked child makes its own. Never destroyed: who computes at exit may
/// still hold it.
SharedRuntime& process_runtime() {
  static SharedRuntime* runtime = nullptr;
  if (!runtime || !runtime->belongs_here()) runtime = new SharedRuntime("auto", "auto", 0);
  return *runtime;
}

}  // namespace

const SharedRuntime& runtime_of(nb::handle object) {
  if (object.is_none()) return process_runtime();
  if (nb::isinstance<SharedRuntime>(object)) return nb::cast<const SharedRuntime&>(object);
  throw nb::type_error(
      ("runtime is a " + name_of_type(object) + "; it must be a fovea.Runtime or None").c_str());
}

void bind_runtime(nb::module_& m) {
  nb::class_<SharedRuntime>(m, "Runtime", R"(Threads, scratch memory and the kernels of a device.

Calls from several Python threads wait for each other; the GIL is released while one computes. A
child process that was forked needs a runtime of its own.

Args:
    backend: "auto" (the environment's FOVEA_BACKEND, else the best here), "cpu" or "reference".
    isa: "auto" (FOVEA_ISA, else the best of this processor), "scalar", "avx2" or "avx512".
    num_threads: 0 takes the processors that this process may use.

Raises:
    ValueError: an unknown name or a negative number of threads.
    NotImplementedError: this processor lacks the isa.)")
      .def(nb::init<const std::string&, const std::string&, int>(), nb::kw_only(),
           nb::arg("backend") = "auto", nb::arg("isa") = "auto", nb::arg("num_threads") = 0)
      .def_prop_ro(
          "backend", [](const SharedRuntime& r) { return std::string(r.get().backend()); },
          "\"cpu\" or \"reference\".")
      .def_prop_ro(
          "isa", [](const SharedRuntime& r) { return std::string(r.get().isa()); },
          "\"scalar\", \"avx2\" or \"avx512\".")
      .def_prop_ro(
          "num_threads", [](const SharedRuntime& r) { return r.get().num_threads(); },
          "Threads that compute.");
  m.def(
      "default_runtime", [] { return &process_runtime(); }, nb::rv_policy::reference,
      "The runtime of calls that name none: made at the first use, with all processors.");
}

}  // namespace fovea::python
