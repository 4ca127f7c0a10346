// DeepSeek's row of 656 bytes: quantised latent, its scales, and the rope part as it is.
#pragma once

#include "core/check.h"
#include "fovea/kv_format.h"

namespace fovea::kv_fp8_ds_mla {

inline constexpr std::int64_t kLatent = 512;
inline constexpr std::int64_t kGroup = 128;  ///< Latent elements of a scale.
inline constexpr std::int64_t kRope = 64;
inline constexpr std::int64_t kScalesAt = kLatent;  ///< Byte of the first scale.
inline constexpr std::int64_t kRopeAt = kScalesAt + kLatent / kGroup * 4;
inline constexpr std::int64_t kRowBytes = kRopeAt + kRope * 2;
static_assert(kRowBytes == 656);

inline void check(const KvFormat& format) {
  FOVEA_CHECK(format.dtype == DType::f8e4m3fn, unsupported,
              "format.dtype is {}, but fp8_ds_mla holds f8e4m3fn", name_of(format.dtype));
  FOVEA_CHECK(format.row_elements == kLatent + kRope && format.num_heads == 1, unsupported,
              "format has {} elements in {} heads, but fp8_ds_mla has {} + {} in one",
              format.row_elements, format.num_heads, kLatent, kRope);
}

}  // namespace fovea::kv_fp8_ds_mla
