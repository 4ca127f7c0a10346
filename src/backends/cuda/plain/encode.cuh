// Rows as a cache stores them.
#pragma once

#include "backends/cuda/plain/block.cuh"
#include "backends/cuda/plain/elements.cuh"
#include "quant/power_of_two.h"

namespace fovea::cuda {

/// group_scale of values [begin, end), in every thread.
template <class Threads, class Code, class Channels>
__device__ float scale_of_group(const Channels& values, std::int64_t begin, std::int64_t end) {
  float amax = 0;
  unsigned long long first_nan = ~0ull;
  for (std::int64_t i = begin + Threads::rank(); i < end; i += Threads::kSize) {
    const float value = values(i);
    if (isfinite(value)) amax = fmaxf(amax, fabsf(value));
    if (isnan(value)) first_nan = min(first_nan, static_cast<unsigned long long>(i));
  }
  amax = Threads::reduce(amax, [](float a, float b) { return fmaxf(a, b); });
  first_nan = Threads::reduce(
      first_nan, [](unsigned long long a, unsigned long long b) { return min(a, b); });
  if (!Code::kHasNan && first_nan != ~0ull) return values(static_cast<std::int64_t>(first_nan));
  return fmaxf(amax / Code::kLargest, std::numeric_limits<float>::min());
}

/// quantize_group of values [begin, end); codes of four bits begin at even ones.
template <class Threads, class Code, class Channels>
__device__ void encode_group(const Channels& values, std::int64_t begin, std::int64_t end,
                             float scale, std::byte* head) {
  auto* codes = reinterpret_cast<std::uint8_t*>(head);
  constexpr int kStep = Code::kPacked ? 2 : 1;
  for (std::int64_t i = begin + kStep * Threads::rank(); i < end; i += kStep * Threads::kSize) {
    std::uint8_t code = Code::encode(values(i) / scale);
    if (Code::kPacked && i + 1 < end) code |= Code::encode(values(i + 1) / scale) << 4;
    codes[i / kStep] = code;
  }
}

__device__ inline void store_unaligned(std::byte* to, float value) {
  memcpy(to, &value, sizeof value);
}

template <class Threads, class Code, class Channels>
__device__ void encode_scaled(const HeadFormat& format, const Channels& values, std::byte* head) {
  switch (format.scales) {
    case KvScales::per_tensor:
      encode_group<Threads, Code>(values, 0, format.elements, format.scale, head);
      break;
    case KvScales::per_token:
      for (int group = 0; group < 2; ++group) {
        const std::int64_t begin = group == 0 ? 0 : format.first_group;
        const std::int64_t end = group == 0 ? format.first_group : format.elements;
        const float scale = scale_of_group<Threads, Code>(values, begin, end);
        encode_group<Threads, Code>(values, begin, end, scale, head);
        if (Threads::rank() == 0) store_unaligned(head + format.code_bytes + group * 4, scale);
      }
      break;
    default: {
      using namespace kv_fp8_ds_mla;
      for (std::int64_t begin = 0; begin < kLatent; begin += kGroup) {
        float scale = scale_of_group<Threads, Code>(values, begin, begin + kGroup);
        if (format.power_of_two_scales) scale = power_of_two_above(scale);
        encode_group<Threads, Code>(values, begin, begin + kGroup, scale, head);
        if (Threads::rank() == 0) store_unaligned(head + kScalesAt + begin / kGroup * 4, scale);
      }
      for (std::int64_t i = Threads::rank(); i < kRope; i += Threads::kSize) {
        store(head + kRopeAt, DType::bf16, i, values(kLatent + i));
      }
    }
  }
}

/// encode_row of one head: values(i) is its element i.
template <class Threads, class Channels>
__device__ void encode_head(const HeadFormat& format, const Channels& values, std::byte* head) {
  switch (format.dtype) {
    case DType::i4:
      return encode_scaled<Threads, IntegerCode<4>>(format, values, head);
    case DType::i8:
      return encode_scaled<Threads, IntegerCode<8>>(format, values, head);
    case DType::f8e5m2:
      return encode_scaled<Threads, FloatCode<Float8E5M2>>(format, values, head);
    case DType::f8e4m3fn:
      return encode_scaled<Threads, FloatCode<Float8E4M3FN>>(format, values, head);
    default:
      for (std::int64_t i = Threads::rank(); i < format.elements; i += Threads::kSize) {
        store(head, format.dtype, i, values(i));
      }
  }
}

}  // namespace fovea::cuda
