#include "backends/cuda/sm90/mla_decode/quantized.cuh"
#include "backends/cuda/sm90/mla_decode/quantized.h"

namespace fovea::cuda::mla {
namespace {

template <typename Format, int kRows>
QuantizedKernel kernel() {
  static_assert(sizeof(QuantizedMemory<Format, kRows>) <= 227 * 1024);
  static_assert(QuantizedMemory<Format, kRows>::kSlots >= 2);
  return {mla_decode_quantized_kernel<Format, kRows>, sizeof(QuantizedMemory<Format, kRows>),
          kQuantizedThreads<kRows>, Format::kRowBytes};
}

template <typename Format>
QuantizedKernel kernel(std::int32_t rows) {
  return rows == 16 ? kernel<Format, 16>() : kernel<Format, 32>();
}

}  // namespace

QuantizedKernel quantized_kernel(CacheFormat format, std::int32_t rows) {
  switch (format) {
    case CacheFormat::fp8_e4m3:
      return kernel<Fp8E4m3>(rows);
    case CacheFormat::int4_per_token:
      return kernel<Int4PerToken>(rows);
    default:
      return kernel<Int8PerToken>(rows);
  }
}

}  // namespace fovea::cuda::mla
