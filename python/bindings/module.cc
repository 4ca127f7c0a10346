#include <nanobind/nanobind.h>

#include "bindings.h"
#include "cache.h"
#include "fovea/error.h"
#include "runtime.h"

namespace nb = nanobind;

namespace {

/// What is not implemented is NotImplementedError; whatever else a caller did wrong is ValueError.
void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const fovea::Error& error) {
    const bool unsupported = error.code() == fovea::ErrorCode::unsupported;
    PyErr_SetString(unsupported ? PyExc_NotImplementedError : PyExc_ValueError, error.what());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "fovea's C++ library. Use the package fovea, which documents it.";
  nb::set_leak_warnings(false);  // Caches of modules and frames of errors may outlive this one.
  nb::register_exception_translator(translate);
  fovea::python::bind_runtime(m);
  fovea::python::bind_cache(m);
  fovea::python::bind_block_pool(m);
  fovea::python::bind_plan(m);
  fovea::python::bind_ops(m);
  fovea::python::bind_dims(m);
  fovea::python::bind_model(m);
  fovea::python::bind_layers(m);
  fovea::python::bind_engine(m);
  fovea::python::bind_oracle(m);
}
