// A model's layers as the float64 oracle takes them.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/model.h"
#include "fovea/oracle.h"

namespace fovea::engine {

/// Elements of a view of rank 1 or 2 with unit innermost stride, decoded by the oracle itself.
std::vector<double> to_doubles(const TensorView& view);

/// A layer's attention weights. The softmax scale and the rotation come from the config's numbers
/// by the oracle's own formulas, not from what the model made of them.
oracle::MlaWeights oracle_weights(const Model& model, std::int64_t layer);

}  // namespace fovea::engine
