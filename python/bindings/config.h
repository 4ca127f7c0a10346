// Model configurations as Python has them.
#pragma once

#include <nanobind/nanobind.h>

#include "fovea/model.h"

namespace fovea::python {

namespace nb = nanobind;

/// A transformers config, its dict, or the path of config.json or of its folder.
ModelConfig read_config(nb::handle config);

/// A RotaryEmbedding, or null for None. Throws TypeError on anything else.
std::shared_ptr<const RotaryEmbedding> rotary_of(nb::handle object);

}  // namespace fovea::python
