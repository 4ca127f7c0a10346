// Division by a number that is known before a kernel is launched.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fovea {

/// A product and a shift in place of a division, which takes a GPU tens of instructions. After
/// Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
class Divisor {
 public:
  /// `value` is 1 to 2^31 - 1.
  explicit Divisor(std::int64_t value) : value_(static_cast<std::uint32_t>(value)) {
    while ((std::int64_t{1} << shift_) < value) ++shift_;
    factor_ = static_cast<std::uint32_t>(
        (std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift_) - value_) / value_ + 1);
  }

  /// `n` is below 2^31.
  FOVEA_HOST_DEVICE std::uint32_t quotient(std::uint32_t n) const {
    return (static_cast<std::uint32_t>(std::uint64_t{n} * factor_ >> 32) + n) >> shift_;
  }
  FOVEA_HOST_DEVICE std::uint32_t remainder(std::uint32_t n) const {
    return n - quotient(n) * value_;
  }

 private:
  std::uint32_t value_, factor_, shift_ = 0;
};

}  // namespace fovea
