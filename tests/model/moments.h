#pragma once

#include <algorithm>
#include <cmath>
#include <span>

namespace fovea::test {

struct Moments {
  double mean = 0, std = 0, largest = 0;
};
inline Moments moments(std::span<const double> x) {
  Moments m;
  for (const double v : x) m.mean += v / static_cast<double>(x.size());
  for (const double v : x) {
    m.std += (v - m.mean) * (v - m.mean) / static_cast<double>(x.size());
    m.largest = std::max(m.largest, std::abs(v));
  }
  m.std = std::sqrt(m.std);
  return m;
}

}  // namespace fovea::test
