#include <cmath>
#include <cstring>
#include <limits>

#include "fovea/oracle.h"

namespace fovea::oracle {
namespace {

double decode_f32(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// IEEE 754 binary16: 1 sign, 5 exponent (bias 15) and 10 fraction bits.
double decode_f16(std::uint16_t bits) {
  const double sign = (bits & 0x8000) ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 0x1f;
  const int fraction = bits & 0x3ff;
  if (exponent == 0x1f) {
    return fraction ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

template <class Bits>
Bits element(const void* bytes, std::int64_t index) {
  Bits bits;
  std::memcpy(&bits, static_cast<const char*>(bytes) + index * std::int64_t{sizeof bits},
              sizeof bits);
  return bits;
}

}  // namespace

std::vector<double> decode(const void* bytes, std::int64_t count, Format format) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    double& value = values[static_cast<std::size_t>(i)];
    switch (format) {
      case Format::f32:
        value = decode_f32(element<std::uint32_t>(bytes, i));
        break;
      case Format::f16:
        value = decode_f16(element<std::uint16_t>(bytes, i));
        break;
      case Format::bf16:  // The upper half of a binary32.
        value = decode_f32(static_cast<std::uint32_t>(element<std::uint16_t>(bytes, i)) << 16);
        break;
    }
  }
  return values;
}

}  // namespace fovea::oracle
