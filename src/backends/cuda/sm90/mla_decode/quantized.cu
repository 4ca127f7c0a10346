#include "backends/cuda/sm90/mla_decode/quantized.cuh"
#include "backends/cuda/sm90/mla_decode/quantized.h"

namespace fovea::cuda::mla {
namespace {

template <typename Format>
QuantizedKernel kernel() {
  static_assert(sizeof(QuantizedMemory<Format>) <= 227 * 1024);
  static_assert(QuantizedMemory<Format>::kSlots >= 2);
  return {mla_decode_quantized_kernel<Format>, sizeof(QuantizedMemory<Format>), kQuantizedThreads,
          Format::kRowBytes};
}

}  // namespace

QuantizedKernel quantized_kernel(CacheFormat format) {
  switch (format) {
    case CacheFormat::fp8_e4m3:
      return kernel<Fp8E4m3>();
    case CacheFormat::fp8_e5m2:
      return kernel<Fp8E5m2>();
    case CacheFormat::fp8_per_token:
      return kernel<Fp8PerToken>();
    case CacheFormat::fp8_ds_mla:
      return kernel<Fp8DsMla>();
    case CacheFormat::int4_per_token:
      return kernel<Int4PerToken>();
    default:
      return kernel<Int8PerToken>();
  }
}

}  // namespace fovea::cuda::mla
