// Kernels' index of the codes of a format.
#pragma once

#include "backends/cpu/kernels.h"

namespace fovea::cpu {

/// `dtype` is that of a format with scales.
inline Codes codes_of(DType dtype) {
  switch (dtype) {
    case DType::f8e4m3fn:
      return Codes::f8e4m3fn;
    case DType::f8e5m2:
      return Codes::f8e5m2;
    case DType::i8:
      return Codes::i8;
    default:
      return Codes::i4;
  }
}

}  // namespace fovea::cpu
