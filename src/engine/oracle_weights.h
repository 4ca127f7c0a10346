// A model's layers as the float64 oracle takes them, and rows against what it says.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/model.h"
#include "fovea/oracle.h"

namespace fovea::engine {

/// Elements of a view of rank 1 or 2 with unit innermost stride, decoded by the oracle itself.
std::vector<double> to_doubles(const TensorView& view);

/// |got - expected| / |expected| of a row; infinite when anything is NaN or nothing was expected.
double relative_error(std::span<const double> expected, std::span<const double> got);

/// A layer's attention weights. The softmax scale and the rotation come from the config's numbers
/// by the oracle's own formulas, not from what the model made of them.
oracle::MlaWeights oracle_weights(const Model& model, std::int64_t layer);

}  // namespace fovea::engine
