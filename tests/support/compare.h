// Comparing results with float64 expectations: tolerances from dtypes and norms, and failures that
// name the worst element.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "fovea/dtype.h"
#include "fovea/tensor.h"
#include "support/poison.h"

namespace fovea::test {

/// Half a unit in the last place of 1: the relative error of one rounding.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0x1p-24;
    case DType::f16:
      return 0x1p-11;
    case DType::bf16:
      return 0x1p-8;
    case DType::f8e4m3fn:
      return 0x1p-4;
    case DType::f8e5m2:
      return 0x1p-3;
    default:
      ADD_FAILURE() << "unit_roundoff: " << name_of(dtype);
      return 0;
  }
}

/// A row may be wrong by relative * |expected row| + absolute, in the Euclidean norm.
struct RowTolerance {
  double relative = 0;
  double absolute = 0;
};

/// Room for `roundings` roundings to `dtype`, each of the size of the row.
inline RowTolerance row_tolerance(DType dtype, double roundings = 4) {
  return {roundings * unit_roundoff(dtype), 0};
}

namespace detail {

inline std::string index_text(const TensorView& view, std::int64_t number) {
  std::string text = "]";
  for (int d = view.ndim - 1; d >= 0; --d) {
    const std::int64_t extent = view.shape[static_cast<std::size_t>(d)];
    text = std::to_string(number % extent) + text;
    if (d > 0) text = ", " + text;
    number /= extent;
  }
  return "[" + text;
}

/// 0 for equal values, equal infinities and NaN on both sides; infinite when only one is finite.
inline double difference(double expected, double got) {
  if (expected == got || (std::isnan(expected) && std::isnan(got))) return 0;
  const double delta = std::abs(expected - got);
  return std::isnan(delta) ? std::numeric_limits<double>::infinity() : delta;
}

inline ::testing::AssertionResult check_count(std::span<const double> expected,
                                              const TensorView& got) {
  if (static_cast<std::int64_t>(expected.size()) == got.numel()) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << expected.size() << " values are expected, but "
                                       << to_string(got) << " has " << got.numel();
}

}  // namespace detail

/// Rows are the innermost dimension. The norm of each row's difference must stay within the
/// tolerance; NaN and infinities must match exactly.
inline ::testing::AssertionResult rows_close(std::span<const double> expected,
                                             const TensorView& got, RowTolerance tolerance) {
  if (auto counted = detail::check_count(expected, got); !counted) return counted;
  if (expected.empty()) return ::testing::AssertionSuccess();
  const std::vector<double> values = to_doubles(got);
  const std::size_t width =
      got.ndim == 0 ? 1
                    : static_cast<std::size_t>(got.shape[static_cast<std::size_t>(got.ndim) - 1]);

  double worst_excess = 1;  // Error over allowed error.
  double worst_error = 0, worst_allowed = 0;
  std::size_t worst_element = 0, bad_rows = 0;
  for (std::size_t begin = 0; begin < values.size(); begin += width) {
    double norm = 0, error = 0, largest = -1;
    std::size_t element = begin;
    for (std::size_t i = begin; i < begin + width; ++i) {
      const double delta = detail::difference(expected[i], values[i]);
      if (std::isfinite(expected[i])) norm += expected[i] * expected[i];
      error += delta * delta;
      if (delta > largest) largest = delta, element = i;
    }
    error = std::sqrt(error);
    const double allowed = tolerance.relative * std::sqrt(norm) + tolerance.absolute;
    if (error <= allowed) continue;
    ++bad_rows;
    const double excess = allowed > 0 ? error / allowed : std::numeric_limits<double>::infinity();
    if (excess >= worst_excess) {
      worst_excess = excess;
      worst_error = error;
      worst_allowed = allowed;
      worst_element = element;
    }
  }
  if (bad_rows == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << bad_rows << " of " << values.size() / width << " rows are off in " << to_string(got)
         << "; worst at " << detail::index_text(got, static_cast<std::int64_t>(worst_element))
         << ": expected " << expected[worst_element] << ", got " << values[worst_element]
         << "; its row's error " << worst_error << ", allowed " << worst_allowed;
}

/// Each element on its own: |expected - got| <= relative * |expected| + absolute.
inline ::testing::AssertionResult values_close(std::span<const double> expected,
                                               const TensorView& got, double absolute,
                                               double relative = 0) {
  if (auto counted = detail::check_count(expected, got); !counted) return counted;
  const std::vector<double> values = to_doubles(got);
  double worst_excess = 0;
  std::size_t worst = 0, bad = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double scale = std::isfinite(expected[i]) ? std::abs(expected[i]) : 0;
    const double excess =
        detail::difference(expected[i], values[i]) - (relative * scale + absolute);
    if (excess <= 0) continue;
    ++bad;
    if (excess > worst_excess) worst_excess = excess, worst = i;
  }
  if (bad == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << bad << " of " << values.size() << " values are off in " << to_string(got)
         << "; worst at " << detail::index_text(got, static_cast<std::int64_t>(worst))
         << ": expected " << expected[worst] << ", got " << values[worst] << ", allowed "
         << relative * std::abs(expected[worst]) + absolute;
}

/// Same dtype, shape and bits, NaN included; strides may differ.
inline ::testing::AssertionResult bits_equal(const TensorView& expected, const TensorView& got) {
  if (expected.dtype != got.dtype || expected.ndim != got.ndim || expected.shape != got.shape) {
    return ::testing::AssertionFailure()
           << "expected " << to_string(expected) << ", got " << to_string(got);
  }
  const auto bytes = static_cast<std::size_t>(bits_of(expected.dtype) / 8);
  std::vector<const std::byte*> addresses;
  addresses.reserve(static_cast<std::size_t>(expected.numel()));
  for_each_element(expected, [&](const auto&, const std::byte* address, std::int64_t) {
    addresses.push_back(address);
  });
  std::int64_t bad = 0, first = 0;
  double first_expected = 0, first_got = 0;
  for_each_element(got, [&](const auto&, const std::byte* address, std::int64_t n) {
    const std::byte* other = addresses[static_cast<std::size_t>(n)];
    if (std::memcmp(address, other, bytes) == 0) return;
    if (bad++ == 0) {
      first = n;
      first_expected = load_element(expected.dtype, other);
      first_got = load_element(got.dtype, address);
    }
  });
  if (bad == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << bad << " of " << got.numel() << " elements differ in bits in " << to_string(got)
         << "; first at " << detail::index_text(got, first) << ": expected " << first_expected
         << ", got " << first_got;
}

}  // namespace fovea::test
