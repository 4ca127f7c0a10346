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

/// 1 sign, 4 exponent (bias 7) and 3 fraction bits; no infinity, NaN at the largest magnitude.
double decode_f8e4m3fn(std::uint8_t bits) {
  const double sign = (bits & 0x80) ? -1.0 : 1.0;
  const int exponent = (bits >> 3) & 0xf;
  const int fraction = bits & 7;
  if (exponent == 0xf && fraction == 7) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(fraction, -9);
  return sign * std::ldexp(8 + fraction, exponent - 10);
}

double decode_i4(std::uint8_t nibble) { return nibble < 8 ? nibble : nibble - 16; }

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
      case Format::f8e4m3fn:
        value = decode_f8e4m3fn(element<std::uint8_t>(bytes, i));
        break;
      case Format::f8e5m2:  // The upper half of a binary16.
        value = decode_f16(static_cast<std::uint16_t>(element<std::uint8_t>(bytes, i) << 8));
        break;
      case Format::i8:
        value = element<std::int8_t>(bytes, i);
        break;
      case Format::i4:
        value = decode_i4(static_cast<std::uint8_t>(
            element<std::uint8_t>(bytes, i / 2) >> (i % 2 == 0 ? 0 : 4) & 0xf));
        break;
    }
  }
  return values;
}

namespace {

/// Appends `count` elements times `scale`.
void append_scaled(std::vector<double>& values, const char* bytes, std::int64_t count,
                   Format format, double scale) {
  for (const double value : decode(bytes, count, format)) values.push_back(value * scale);
}

std::int64_t bytes_of(Format format, std::int64_t count) {
  switch (format) {
    case Format::f32:
      return 4 * count;
    case Format::f16:
    case Format::bf16:
      return 2 * count;
    case Format::f8e4m3fn:
    case Format::f8e5m2:
    case Format::i8:
      return count;
    case Format::i4:
      break;
  }
  return (count + 1) / 2;
}

}  // namespace

std::vector<double> decode_row(const void* bytes, std::int64_t count, const RowFormat& row) {
  const char* at = static_cast<const char*>(bytes);
  const std::int64_t head = count / row.num_heads;
  const std::int64_t element_bytes = bytes_of(row.format, head);
  std::vector<double> values;
  switch (row.scales) {
    case RowScales::none:
      append_scaled(values, at, count, row.format, 1);
      break;
    case RowScales::per_tensor:
      append_scaled(values, at, count, row.format, row.scale);
      break;
    case RowScales::per_token:
      for (std::int64_t h = 0; h < row.num_heads; ++h, at += element_bytes + 8) {
        const std::vector<double> scales = decode(at + element_bytes, 2, Format::f32);
        append_scaled(values, at, row.first_group, row.format, scales[0]);
        append_scaled(values, at + bytes_of(row.format, row.first_group), head - row.first_group,
                      row.format, scales[1]);
      }
      break;
    case RowScales::ds_mla: {
      const std::vector<double> scales = decode(at + 512, 4, Format::f32);
      for (std::int64_t g = 0; g < 4; ++g) {
        append_scaled(values, at + 128 * g, 128, Format::f8e4m3fn,
                      scales[static_cast<std::size_t>(g)]);
      }
      append_scaled(values, at + 528, 64, Format::bf16, 1);
      break;
    }
  }
  return values;
}

}  // namespace fovea::oracle
