// How the kernels of this chip find cached values stored.
#pragma once

#include <cstdint>

#include "fovea/kv_format.h"

namespace fovea::cuda {

/// Of a latent row, or of one head of a row. Scales multiply the stored codes.
enum class CacheFormat : std::int32_t {
  dense,           ///< Elements of a compute dtype.
  fp8_e4m3,        ///< One byte a channel, one scale for the tensor.
  fp8_e5m2,        ///< Likewise.
  int8_per_token,  ///< One byte a channel, then two f32: scales of the first and second group of
                   ///< channels (latent and rope; the halves of a head).
  int4_per_token,  ///< Half a byte a channel, the even one in the low nibble; then as int8.
  fp8_per_token,   ///< e4m3, otherwise as int8.
  fp8_ds_mla,      ///< e4m3 latents, a f32 scale for each 128 of them, bf16 rope channels.
};

/// Two f32 follow the codes of a row or head.
constexpr bool has_token_scales(CacheFormat format) {
  return format == CacheFormat::int8_per_token || format == CacheFormat::int4_per_token ||
         format == CacheFormat::fp8_per_token;
}

/// Of a format that is one of these.
inline CacheFormat cache_format(const KvFormat& format) {
  switch (format.scales) {
    case KvScales::none:
      return CacheFormat::dense;
    case KvScales::per_tensor:
      return format.dtype == DType::f8e4m3fn ? CacheFormat::fp8_e4m3 : CacheFormat::fp8_e5m2;
    case KvScales::ds_mla:
      return CacheFormat::fp8_ds_mla;
    default:
      return format.dtype == DType::i8         ? CacheFormat::int8_per_token
             : format.dtype == DType::f8e4m3fn ? CacheFormat::fp8_per_token
                                               : CacheFormat::int4_per_token;
  }
}

}  // namespace fovea::cuda
