// Projections in FP8, and the same values for the oracle.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "fovea/linear.h"
#include "fovea/oracle.h"
#include "support/poison.h"

namespace fovea::test {

/// code * scale in float64, decoded by the oracle.
inline std::vector<double> fp8_values(const QuantizedWeight& weight) {
  const std::int64_t rows = weight.codes.shape[0], columns = weight.codes.shape[1];
  std::vector<double> values =
      oracle::decode(weight.codes.data, rows * columns, oracle::Format::f8e4m3fn);
  const std::vector<double> scales = to_doubles(weight.scale);
  const std::int64_t width = weight.scale.shape[1];
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const std::int64_t row = weight.groups.out == 0 ? 0 : i / columns / weight.groups.out;
    const std::int64_t column = weight.groups.in == 0 ? 0 : i % columns / weight.groups.in;
    values[static_cast<std::size_t>(i)] *= scales[static_cast<std::size_t>(row * width + column)];
  }
  return values;
}

/// Puts FP8 codes and a scale in the place of dense projections, and keeps their memory.
class Fp8Projections {
 public:
  /// Returns the values that the projection has now.
  std::vector<double> quantize(const WeightGroups& groups, TensorView& projection,
                               WeightScale& scale) {
    memory_.push_back(quantize_weight(projection, groups));
    const OwnedQuantizedWeight& weight = memory_.back();
    projection = weight.codes;
    scale = {weight.scale, groups};
    return fp8_values(weight);
  }

 private:
  std::vector<OwnedQuantizedWeight> memory_;
};

}  // namespace fovea::test
