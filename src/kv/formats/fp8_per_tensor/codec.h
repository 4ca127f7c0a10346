// Elements of rows with one scale per tensor.
#pragma once

#include <span>

#include "fovea/kv_format.h"
#include "fovea/quant.h"

namespace fovea::kv_fp8_per_tensor {

inline void encode_head(const KvFormat& format, std::span<const float> values,
                        std::span<std::byte> head) {
  quantize_group(format.dtype, values, format.scale, head);
}

inline void decode_head(const KvFormat& format, std::span<const std::byte> head,
                        std::span<float> values) {
  dequantize_group(format.dtype, head, format.scale, values);
}

}  // namespace fovea::kv_fp8_per_tensor
