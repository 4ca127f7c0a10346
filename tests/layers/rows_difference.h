// How far two outputs are apart.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace fovea::test {

/// Largest difference of two outputs' rows over the row norm.
inline double worst_row_difference(const std::vector<double>& a, const std::vector<double>& b,
                                   std::int64_t width) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (std::size_t begin = 0; begin + static_cast<std::size_t>(width) <= a.size();
       begin += static_cast<std::size_t>(width)) {
    double norm = 0, error = 0;
    for (std::size_t i = begin; i < begin + static_cast<std::size_t>(width); ++i) {
      norm += a[i] * a[i];
      error += (a[i] - b[i]) * (a[i] - b[i]);
    }
    worst = std::max(worst, std::sqrt(error / norm));
  }
  return worst;
}

}  // namespace fovea::test
