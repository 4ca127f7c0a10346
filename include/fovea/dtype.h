// Element types and their exact scalar conversions.
#pragma once

#include <cstdint>
#include <string_view>

namespace fovea {

enum class DType : std::uint8_t {
  f32,
  f16,
  bf16,
  f8e4m3fn,  ///< 1-4-3, bias 7, no infinity, NaN at 0x7f and 0xff, largest 448.
  f8e5m2,    ///< 1-5-2, bias 15, IEEE infinities and NaNs, largest finite 57344.
  f8e8m0,    ///< An unsigned power of two, 2^(code - 127); NaN at 0xff.
  f4e2m1,    ///< 1-2-1, bias 1, no infinity, no NaN, largest 6; two per byte, low nibble first.
  i8,
  i4,  ///< Two's complement nibble, -8 to 7; two per byte, low nibble first.
  u8,
  i32,
  i64,
};

/// Bits of one element: 4, 8, 16, 32 or 64.
int bits_of(DType dtype);

/// Bytes of `count` elements, rounded up to a whole byte.
std::int64_t bytes_of(DType dtype, std::int64_t count);

/// The enumerator's name, "bf16" for DType::bf16.
std::string_view name_of(DType dtype);

/// Inverse of name_of. Throws Error(invalid_argument) that lists the known names.
DType parse_dtype(std::string_view name);

/// True for f32, f16 and bf16: the dtypes that kernels compute with.
bool is_compute_dtype(DType dtype);

// Storage of one element. Value-initialised to zero, bit patterns are the formats' own.
struct Float16 {
  std::uint16_t bits = 0;
};
struct BFloat16 {
  std::uint16_t bits = 0;
};
struct Float8E4M3FN {
  std::uint8_t bits = 0;
};
struct Float8E5M2 {
  std::uint8_t bits = 0;
};
struct Float8E8M0 {
  std::uint8_t bits = 0;
};
struct Float4E2M1 {
  std::uint8_t bits = 0;  ///< In the low nibble.
};

// Exact: every code has one float32 value.
float to_float(float x);
float to_float(Float16 x);
float to_float(BFloat16 x);
float to_float(Float8E4M3FN x);
float to_float(Float8E5M2 x);
float to_float(Float8E8M0 x);
float to_float(Float4E2M1 x);

/// Round to nearest, ties to even. NaN stays NaN where the format has one.
///   f16, bf16, f8e5m2: values beyond the largest finite one round to infinity as IEEE 754 says,
///     except that `from_float_saturated` gives the largest finite value of the sign, for
///     infinities too.
///   f8e4m3fn, f4e2m1: always saturated (there is no infinity); infinity saturates too.
///   f8e8m0: nearest power of two, ties to the even code; zero and negatives give the smallest
///     code; infinity saturates to 2^127.
///   f4e2m1: NaN gives +6, as the format has no NaN.
template <class T>
T from_float(float x);
template <class T>
T from_float_saturated(float x);

/// DType of a storage type: dtype_of<BFloat16> == DType::bf16.
template <class T>
inline constexpr DType dtype_of = [] {
  static_assert(sizeof(T) == 0, "this type is no storage type of one element");
  return DType::u8;
}();
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<Float16> = DType::f16;
template <>
inline constexpr DType dtype_of<BFloat16> = DType::bf16;
template <>
inline constexpr DType dtype_of<Float8E4M3FN> = DType::f8e4m3fn;
template <>
inline constexpr DType dtype_of<Float8E5M2> = DType::f8e5m2;
template <>
inline constexpr DType dtype_of<Float8E8M0> = DType::f8e8m0;
template <>
inline constexpr DType dtype_of<std::uint8_t> = DType::u8;
template <>
inline constexpr DType dtype_of<std::int8_t> = DType::i8;
template <>
inline constexpr DType dtype_of<std::int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<std::int64_t> = DType::i64;

}  // namespace fovea
