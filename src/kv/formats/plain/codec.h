// Elements of plain rows.
#pragma once

#include <cstring>
#include <span>

#include "core/float_bits.h"
#include "fovea/kv_format.h"

namespace fovea::kv_plain {

/// Calls fn with an element of the format's type.
template <class F>
void with_element(const KvFormat& format, F&& fn) {
  switch (format.dtype) {
    case DType::f16:
      return fn(Float16{});
    case DType::bf16:
      return fn(BFloat16{});
    default:
      return fn(float{});
  }
}

inline void encode_head(const KvFormat& format, std::span<const float> values,
                        std::span<std::byte> head) {
  with_element(format, [&]<class T>(T) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T element = narrow<T>(values[i]);
      std::memcpy(head.data() + i * sizeof element, &element, sizeof element);
    }
  });
}

inline void decode_head(const KvFormat& format, std::span<const std::byte> head,
                        std::span<float> values) {
  with_element(format, [&]<class T>(T element) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::memcpy(&element, head.data() + i * sizeof element, sizeof element);
      values[i] = widen(element);
    }
  });
}

}  // namespace fovea::kv_plain
