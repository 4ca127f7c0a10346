// Index tensors come as i32 or i64.
#pragma once

#include <cstdint>

#include "fovea/tensor.h"

namespace fovea {

/// Element `i` of a one-dimensional i32 or i64 view.
inline std::int64_t index_at(const TensorView& view, std::int64_t i) {
  const std::int64_t offset = i * view.strides[0];
  return view.dtype == DType::i64 ? static_cast<const std::int64_t*>(view.data)[offset]
                                  : static_cast<const std::int32_t*>(view.data)[offset];
}

}  // namespace fovea
