// What every format has: checks and the codec of one head.
#pragma once

#include <span>

#include "fovea/kv_format.h"

namespace fovea {

/// Throws Error unless the fields describe a format.
void check_format(const KvFormat& format);

/// Values [head_elements] to bytes [head_bytes] and back; the format is a checked one.
void encode_head(const KvFormat& format, std::span<const float> values, std::span<std::byte> head);
void decode_head(const KvFormat& format, std::span<const std::byte> head, std::span<float> values);

}  // namespace fovea
