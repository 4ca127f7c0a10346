// Stored rows of a latent cache: for checks on the host, for timings on the device.
#pragma once

#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#include "backends/cuda/sm90/mla_decode/params.h"

namespace fovea::cuda::test {

constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kRow = kLatent + kRope;

inline std::int64_t row_bytes(CacheFormat format) {
  switch (format) {
    case CacheFormat::dense:
      return 2 * kRow;
    case CacheFormat::fp8_e4m3:
    case CacheFormat::fp8_e5m2:
      return kRow;
    case CacheFormat::int8_per_token:
    case CacheFormat::fp8_per_token:
      return kRow + 8;
    case CacheFormat::int4_per_token:
      return kRow / 2 + 8;
    case CacheFormat::fp8_ds_mla:
      return kLatent + 16 + 2 * kRope;
  }
  return 0;
}

inline __nv_fp8_interpretation_t fp8_of(CacheFormat format) {
  return format == CacheFormat::fp8_e5m2 ? __NV_E5M2 : __NV_E4M3;
}

/// Random codes and scales, the latter of very different sizes. The NaN, if wanted, is in a code
/// where the format has such codes, otherwise in the latent's scale; of fp8_ds_mla anywhere.
inline void fill_quantized_row(CacheFormat format, std::uint8_t* row, bool nan,
                               std::mt19937& random) {
  std::normal_distribution<float> normal;
  if (format == CacheFormat::fp8_e4m3 || format == CacheFormat::fp8_e5m2 ||
      format == CacheFormat::fp8_per_token) {
    for (int d = 0; d < kRow; ++d) {
      row[d] = __nv_cvt_float_to_fp8(normal(random), __NV_SATFINITE, fp8_of(format));
    }
    if (nan) row[random() % kRow] = 0x7f;
    const float scales[2] = {std::exp(normal(random)), std::exp(normal(random))};
    if (format == CacheFormat::fp8_per_token) std::memcpy(row + kRow, scales, 8);
    return;
  }
  if (format == CacheFormat::fp8_ds_mla) {
    for (int d = 0; d < kLatent; ++d) {
      row[d] = __nv_cvt_float_to_fp8(100 * normal(random), __NV_SATFINITE, __NV_E4M3);
    }
    float scales[4];
    for (float& scale : scales) scale = 0.01f * std::exp(normal(random));
    std::memcpy(row + kLatent, scales, 16);
    for (int d = 0; d < kRope; ++d) {
      const std::uint16_t bits = encode(ElementType::bf16, normal(random));
      std::memcpy(row + kLatent + 16 + 2 * d, &bits, 2);
    }
    const std::uint32_t where = random() % 3;
    if (nan && where == 0) row[random() % kLatent] = 0xff;
    if (nan && where == 1) std::memset(row + kLatent + 4 * (random() % 4), 0xff, 4);
    if (nan && where == 2) std::memset(row + kLatent + 16 + 2 * (random() % kRope), 0xff, 2);
    return;
  }
  const bool bytewise = format == CacheFormat::int8_per_token;
  for (int i = 0; i < (bytewise ? kRow : kRow / 2); ++i) {
    row[i] = static_cast<std::uint8_t>(bytewise ? static_cast<int>(random() % 255) - 127
                                                : static_cast<int>(random() % 256));
  }
  const float unit = bytewise ? 0.015f : 0.2f;
  float scales[2] = {unit * std::exp(normal(random)), unit * std::exp(normal(random))};
  if (nan) scales[0] = NAN;
  std::memcpy(row + (bytewise ? kRow : kRow / 2), scales, 8);
}

/// Codes and scales of whole rows. e4m3 codes are no NaN and of magnitudes up to 1; bf16 are small.
static __global__ void fill_rows(std::uint8_t* data, std::size_t rows, CacheFormat format,
                                 int row_bytes) {
  for (std::size_t row = blockIdx.x; row < rows; row += gridDim.x) {
    std::uint8_t* at = data + row * row_bytes;
    const bool e4m3 = format == CacheFormat::fp8_e4m3 || format == CacheFormat::fp8_ds_mla;
    const int codes = e4m3 ? row_bytes : row_bytes - 8;
    for (int i = threadIdx.x; i < codes; i += blockDim.x) {
      std::uint64_t x = (row << 10) + i + 1;
      x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ull;
      x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
      const auto byte = static_cast<std::uint8_t>(x >> 40);
      at[i] = e4m3 ? byte & 0xbf : byte;
    }
    if (codes < row_bytes && threadIdx.x < 2) {
      reinterpret_cast<float*>(at + codes)[threadIdx.x] =
          format == CacheFormat::int8_per_token ? 0.015f : 0.2f;
    }
    __syncthreads();  // Other threads' codes lie where these scales belong.
    if (format == CacheFormat::fp8_ds_mla && threadIdx.x < 4) {
      reinterpret_cast<float*>(at + kLatent)[threadIdx.x] = 0.5f;
    }
  }
}

}  // namespace fovea::cuda::test
