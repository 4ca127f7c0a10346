#include "fovea/dtype.h"

#include <iterator>
#include <string>

#include "core/check.h"
#include "core/float_bits.h"

namespace fovea {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  int bits;
};

// In the order of the enumerators.
constexpr DTypeInfo kInfo[] = {
    {DType::f32, "f32", 32},      {DType::f16, "f16", 16},
    {DType::bf16, "bf16", 16},    {DType::f8e4m3fn, "f8e4m3fn", 8},
    {DType::f8e5m2, "f8e5m2", 8}, {DType::f8e8m0, "f8e8m0", 8},
    {DType::f4e2m1, "f4e2m1", 4}, {DType::i8, "i8", 8},
    {DType::i4, "i4", 4},         {DType::u8, "u8", 8},
    {DType::i32, "i32", 32},      {DType::i64, "i64", 64},
};

const DTypeInfo& info_of(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  FOVEA_CHECK(index < std::size(kInfo), invalid_argument,
              "dtype is enumerator {}, but must be one of the {} of DType", index,
              std::size(kInfo));
  return kInfo[index];
}

}  // namespace

int bits_of(DType dtype) { return info_of(dtype).bits; }

std::int64_t bytes_of(DType dtype, std::int64_t count) {
  const int bits = bits_of(dtype);
  return bits < 8 ? count / 2 + count % 2 : count * (bits / 8);
}

std::string_view name_of(DType dtype) { return info_of(dtype).name; }

DType parse_dtype(std::string_view name) {
  std::string known;
  for (const DTypeInfo& info : kInfo) {
    if (info.name == name) return info.dtype;
    known += known.empty() ? "" : ", ";
    known += info.name;
  }
  fail(ErrorCode::invalid_argument, "dtype is '{}', but must be one of {}", name, known);
}

bool is_compute_dtype(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

float to_float(float x) { return x; }
float to_float(Float16 x) { return widen(x); }
float to_float(BFloat16 x) { return widen(x); }
float to_float(Float8E4M3FN x) { return widen(x); }
float to_float(Float8E5M2 x) { return widen(x); }
float to_float(Float8E8M0 x) { return widen(x); }
float to_float(Float4E2M1 x) { return widen(x); }

template <class T>
T from_float(float x) {
  return narrow<T>(x);
}
template <class T>
T from_float_saturated(float x) {
  return narrow_saturated<T>(x);
}

template Float16 from_float(float);
template BFloat16 from_float(float);
template Float8E4M3FN from_float(float);
template Float8E5M2 from_float(float);
template Float8E8M0 from_float(float);
template Float4E2M1 from_float(float);
template <>
float from_float(float x) {
  return x;
}
template Float16 from_float_saturated(float);
template BFloat16 from_float_saturated(float);
template Float8E4M3FN from_float_saturated(float);
template Float8E5M2 from_float_saturated(float);
template Float8E8M0 from_float_saturated(float);
template Float4E2M1 from_float_saturated(float);

}  // namespace fovea
