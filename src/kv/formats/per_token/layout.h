// A head is its elements, then the scale of its first group and the scale of the rest.
#pragma once

#include "core/check.h"
#include "fovea/kv_format.h"

namespace fovea::kv_per_token {

inline void check(const KvFormat& format) {
  FOVEA_CHECK(
      format.dtype == DType::i8 || format.dtype == DType::f8e4m3fn || format.dtype == DType::i4,
      unsupported,
      "format.dtype is {}, but a cache with scales per token holds i8, "
      "f8e4m3fn or i4",
      name_of(format.dtype));
  const std::int64_t elements = format.head_elements();
  FOVEA_CHECK(format.first_group >= 0 && format.first_group <= elements, invalid_argument,
              "format.first_group is {}, but must be in [0, {}], the elements of a head",
              format.first_group, elements);
  FOVEA_CHECK(format.dtype != DType::i4 || (elements % 2 == 0 && format.first_group % 2 == 0),
              invalid_argument,
              "a head has {} elements, the first group {}, but with i4 both must be even", elements,
              format.first_group);
}

/// Bytes of the elements: where the scales start.
inline std::int64_t element_bytes(const KvFormat& format) {
  return bytes_of(format.dtype, format.head_elements());
}
inline std::int64_t head_bytes(const KvFormat& format) {
  return element_bytes(format) + 2 * std::int64_t{sizeof(float)};
}

}  // namespace fovea::kv_per_token
