#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/check.h"
#include "fovea/quant.h"
#include "quant/codes.h"

namespace fovea {
namespace {

/// Calls fn with the codec of `dtype`.
template <class F>
auto with_codec(DType dtype, F&& fn) {
  switch (dtype) {
    case DType::i8:
      return fn(IntegerCode<8>{});
    case DType::i4:
      return fn(IntegerCode<4>{});
    case DType::f8e4m3fn:
      return fn(FloatCode<Float8E4M3FN>{});
    case DType::f8e5m2:
      return fn(FloatCode<Float8E5M2>{});
    case DType::f4e2m1:
      return fn(FloatCode<Float4E2M1>{});
    default:
      fail(ErrorCode::invalid_argument,
           "dtype is {}, but must be i8, i4, f8e4m3fn, f8e5m2 or f4e2m1 for a group codec",
           name_of(dtype));
  }
}

void check_group(DType dtype, std::size_t codes, float scale, std::size_t values) {
  const std::int64_t bytes = bytes_of(dtype, static_cast<std::int64_t>(values));
  FOVEA_CHECK(static_cast<std::int64_t>(codes) == bytes, invalid_argument,
              "codes has {} bytes, but {} values of {} take {}", codes, values, name_of(dtype),
              bytes);
  FOVEA_CHECK(std::isnan(scale) || (scale > 0 && std::isfinite(scale)), invalid_argument,
              "scale is {}, but must be positive and finite", scale);
}

}  // namespace

bool is_quantized_dtype(DType dtype) {
  return dtype == DType::i8 || dtype == DType::i4 || dtype == DType::f8e4m3fn ||
         dtype == DType::f8e5m2 || dtype == DType::f4e2m1;
}

float largest_code_value(DType dtype) {
  return with_codec(dtype, []<class Codec>(Codec) { return Codec::kLargest; });
}

float group_scale(DType dtype, std::span<const float> values) {
  const float largest = largest_code_value(dtype);
  const bool has_nan_code = with_codec(dtype, []<class Codec>(Codec) { return Codec::kHasNan; });
  float amax = 0;
  for (const float value : values) {
    if (std::isnan(value) && !has_nan_code) return value;
    if (std::isfinite(value)) amax = std::max(amax, std::abs(value));
  }
  return std::max(amax / largest, std::numeric_limits<float>::min());
}

void quantize_group(DType dtype, std::span<const float> values, float scale,
                    std::span<std::byte> codes) {
  with_codec(dtype, [&]<class Codec>(Codec) {
    check_group(dtype, codes.size(), scale, values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::byte code{Codec::encode(values[i] / scale)};
      if constexpr (Codec::kPacked) {
        std::byte& pair = codes[i / 2];
        pair = i % 2 == 0 ? code : pair | code << 4;
      } else {
        codes[i] = code;
      }
    }
  });
}

void dequantize_group(DType dtype, std::span<const std::byte> codes, float scale,
                      std::span<float> values) {
  with_codec(dtype, [&]<class Codec>(Codec) {
    check_group(dtype, codes.size(), scale, values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      auto code = std::to_integer<std::uint8_t>(codes[Codec::kPacked ? i / 2 : i]);
      if constexpr (Codec::kPacked) code = i % 2 == 0 ? code & 0xf : code >> 4;
      values[i] = Codec::decode(code) * scale;
    }
  });
}

}  // namespace fovea
