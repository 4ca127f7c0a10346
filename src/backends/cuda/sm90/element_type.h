// Elements that the kernels of this chip compute with.
#pragma once

#include <cstdint>

#include "fovea/dtype.h"

namespace fovea::cuda {

enum class ElementType : std::int32_t { f32, f16, bf16 };

/// Of a compute dtype.
inline ElementType element_type(DType dtype) {
  return dtype == DType::f16    ? ElementType::f16
         : dtype == DType::bf16 ? ElementType::bf16
                                : ElementType::f32;
}

}  // namespace fovea::cuda
