// A token's row is its elements in an 8-bit float, one after the other; one scale serves all rows.
#pragma once

#include <cmath>

#include "core/check.h"
#include "fovea/kv_format.h"

namespace fovea::kv_fp8_per_tensor {

inline void check(const KvFormat& format) {
  FOVEA_CHECK(format.dtype == DType::f8e4m3fn || format.dtype == DType::f8e5m2, unsupported,
              "format.dtype is {}, but a cache with one scale per tensor holds f8e4m3fn or f8e5m2",
              name_of(format.dtype));
  FOVEA_CHECK(std::isfinite(format.scale) && format.scale > 0, invalid_argument,
              "format.scale is {}, but must be positive and finite", format.scale);
}

inline std::int64_t head_bytes(const KvFormat& format) { return format.head_elements(); }

}  // namespace fovea::kv_fp8_per_tensor
