// A token's row is its elements, one after the other, in a compute dtype.
#pragma once

#include "core/check.h"
#include "fovea/kv_format.h"

namespace fovea::kv_plain {

inline void check(const KvFormat& format) {
  FOVEA_CHECK(is_compute_dtype(format.dtype), unsupported,
              "format.dtype is {}, but a cache of plain rows holds f32, f16 or bf16",
              name_of(format.dtype));
}

/// Rows start at multiples of this, so that elements may be loaded by their type.
inline std::int64_t row_alignment(const KvFormat& format) { return bits_of(format.dtype) / 8; }

}  // namespace fovea::kv_plain
