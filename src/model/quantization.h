// quantization_config of a config.json, as far as FP8 weights need it.
#pragma once

#include "fovea/model.h"
#include "model/config_fields.h"

namespace fovea {

/// Reads the object quantization_config. Throws Error(unsupported) that names a method, format or
/// strategy that is not read, Error(corrupt_file) for what is missing or malformed.
WeightQuantization parse_weight_quantization(const ConfigFields& fields);

}  // namespace fovea
