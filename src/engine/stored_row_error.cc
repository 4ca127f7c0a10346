#include "engine/stored_row_error.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"

namespace fovea::engine {
namespace {

/// What the formats' definitions say of an element's codes.
struct Codes {
  double largest;  ///< That a scale maps to.
  int mantissa_bits = 0;
  int min_exponent = 0;  ///< Below it steps stay as they are.
  /// Half the distance of two codes around `code`, a magnitude that need not have one.
  double half_step(double code) const {
    const int exponent = code > 0 ? std::ilogb(code) : min_exponent;
    return std::ldexp(0.5, std::max(exponent, min_exponent) - mantissa_bits);
  }
};

Codes codes_of(DType dtype) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  // Integers lie 1 apart as far as they reach: as if they had that many bits of a mantissa.
  switch (dtype) {
    case DType::i8:
      return {127, 7, 7};
    case DType::i4:
      return {7, 3, 3};
    case DType::f8e4m3fn:
      return {448, 3, -6};
    case DType::f8e5m2:
      return {57344, 2, -14};
    case DType::f16:
      return {kNone, 10, -14};
    case DType::bf16:
      return {kNone, 7, -126};
    case DType::f32:
      return {kNone, 23, -126};
    default:
      fail(ErrorCode::unsupported, "a cache has no rows of {}", name_of(dtype));
  }
}

double largest_magnitude(std::span<const double> values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

class Comparison {
 public:
  Comparison(std::span<const double> expected, std::span<const double> stored)
      : expected_(expected), stored_(stored) {}

  /// Elements [begin, end) are codes of `dtype` times `scale`.
  void compare(std::size_t begin, std::size_t end, DType dtype, double scale) {
    double squares = 0;
    for (std::size_t i = begin; i < end; ++i) squares += expected_[i] * expected_[i];
    const double mean = std::sqrt(squares / static_cast<double>(end - begin));
    const Codes codes = codes_of(dtype);
    const double limit = scale * codes.largest;
    for (std::size_t i = begin; i < end; ++i) {
      const double target = std::clamp(expected_[i], -limit, limit);
      const double allowed = scale * codes.half_step(std::abs(target) / scale);
      const double excess = std::max(0.0, std::abs(stored_[i] - target) - allowed);
      // Of zeros nothing else than zeros may be made.
      double error = excess > 0 ? excess / std::max(mean, std::abs(target)) : 0;
      if (std::isnan(stored_[i])) error = std::numeric_limits<double>::infinity();
      if (error > worst_.error) worst_ = {error, i};
      excess_squares_ += excess * excess;
    }
    squares_ += squares;
  }

  /// The same under the scale that maps their largest to the largest code.
  void compare_scaled(std::size_t begin, std::size_t end, DType dtype, bool power_of_two) {
    double scale =
        largest_magnitude(expected_.subspan(begin, end - begin)) / codes_of(dtype).largest;
    if (power_of_two) scale = std::exp2(std::ceil(std::log2(scale)));
    compare(begin, end, dtype,
            std::max(scale, static_cast<double>(std::numeric_limits<float>::min())));
  }

  StoredRowError result() const {
    constexpr double kWorstOfMany = 3;
    const double of_norm = squares_ > 0 ? std::sqrt(excess_squares_ / squares_) : 0;
    return {std::max(worst_.error / kWorstOfMany, of_norm), worst_.element};
  }

 private:
  std::span<const double> expected_, stored_;
  double squares_ = 0;
  double excess_squares_ = 0;
  StoredRowError worst_;
};

}  // namespace

StoredRowError stored_row_error(const KvFormat& format, std::span<const double> expected,
                                std::span<const double> stored) {
  Comparison row(expected, stored);
  const auto elements = static_cast<std::size_t>(format.row_elements);
  const auto head = static_cast<std::size_t>(format.head_elements());
  switch (format.scales) {
    case KvScales::none:
    case KvScales::per_tensor:
      row.compare(0, elements, format.dtype, static_cast<double>(format.scale));
      break;
    case KvScales::per_token:
      for (std::size_t begin = 0; begin < elements; begin += head) {
        const std::size_t middle = begin + static_cast<std::size_t>(format.first_group);
        row.compare_scaled(begin, middle, format.dtype, false);
        row.compare_scaled(middle, begin + head, format.dtype, false);
      }
      break;
    case KvScales::ds_mla: {
      constexpr std::size_t kLatent = 512, kTile = 128;
      for (std::size_t begin = 0; begin < kLatent; begin += kTile) {
        row.compare_scaled(begin, begin + kTile, format.dtype, format.power_of_two_scales);
      }
      row.compare(kLatent, elements, DType::bf16, 1);
      break;
    }
  }
  return row.result();
}

}  // namespace fovea::engine
