// What each file of bindings adds to the module.
#pragma once

#include <nanobind/nanobind.h>

#include <type_traits>

namespace fovea::python {

/// A function without defaults or documentation, whose arguments may all be None: a module of
/// fovea's in Python has these.
template <class Result, class... Args>
void bind_call(nanobind::module_& m, const char* name, Result (*function)(Args...)) {
  m.def(name, function, (static_cast<void>(std::type_identity<Args>{}), nanobind::arg().none())...);
}

void bind_ops(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_dims(nanobind::module_& m);
void bind_layers(nanobind::module_& m);
void bind_model(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_oracle(nanobind::module_& m);

}  // namespace fovea::python
