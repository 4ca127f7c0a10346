// Queries and outputs as codes.
#include <type_traits>

#include "backends/cuda/plain/block.cuh"
#include "backends/cuda/plain/kernels.h"
#include "backends/cuda/plain/rows.cuh"
#include "core/divisor.h"
#include "quant/output_codec.h"
#include "quant/power_of_two.h"

namespace fovea::cuda::plain {
namespace {

using E4m3 = FloatCode<Float8E4M3FN>;
using E2m1 = FloatCode<Float4E2M1>;

/// Those of codes[0, kCount) that lie before `end`.
template <int kCount>
__device__ void store_codes(const std::uint8_t (&codes)[kCount], std::uint8_t* to,
                            const std::uint8_t* end) {
  using Word = std::conditional_t<kCount == 8, std::uint64_t, std::uint32_t>;
  static_assert(sizeof(Word) == kCount);
  if (to + kCount <= end && reinterpret_cast<std::uintptr_t>(to) % kCount == 0) {
    Word word;
    memcpy(&word, codes, kCount);
    *reinterpret_cast<Word*>(to) = word;
  } else {
    for (int j = 0; j < kCount; ++j) {
      if (to + j < end) to[j] = codes[j];
    }
  }
}

/// Channels from `to` on.
__device__ void quantize_part(const ElementRow& part, float scale, std::uint8_t* to) {
  for (std::int64_t i = Warp::rank() * kTogether; i < part.width(); i += Warp::kSize * kTogether) {
    const Values values = part.load(i);
    std::uint8_t codes[kTogether];
    for (int j = 0; j < kTogether; ++j) codes[j] = E4m3::encode(values.at[j] / scale);
    store_codes(codes, to + i, to + part.width());
  }
}

/// A warp per token and head.
__global__ void quantize_query_kernel(const __grid_constant__ QuantizeQueryParams p,
                                      Divisor heads) {
  const std::uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32;
  const std::int64_t t = heads.quotient(i), n = heads.remainder(i);
  if (t >= p.out.shape[0]) return;
  auto* out = static_cast<std::uint8_t*>(p.out.data) + at(p.out, t, n);
  quantize_part(ElementRow(p.q_latent, at(p.q_latent, t, n)), p.scale, out);
  quantize_part(ElementRow(p.q_pe, at(p.q_pe, t, n)), p.scale, out + p.q_latent.shape[2]);
}

struct OutputGroups {
  OutputQuant kind;
  float scale;  ///< Of stored values; unless groups have their own.
  std::int64_t size;   ///< 16, 64 or 128 channels, or what a thread has.
  std::int64_t count;  ///< Of a row.
};

__device__ void store_group_scale(const TensorView& scales, std::int64_t t, std::int64_t group,
                                  float scale) {
  const std::int64_t offset = at(scales, t, group);
  if (scales.dtype == DType::f32) {
    static_cast<float*>(scales.data)[offset] = scale;
  } else {
    static_cast<std::uint8_t*>(scales.data)[offset] =
        scale == 0.f ? std::uint8_t{0} : narrow<Float8E8M0>(scale).bits;
  }
}

/// The largest finite magnitude of a group that lies in `lanes` lanes; NaN when a value is.
__device__ float group_amax(const Values& values, int lanes) {
  float amax = 0.f;
  bool has_nan = false;
  for (int j = 0; j < kTogether; ++j) {
    if (isfinite(values.at[j])) amax = fmaxf(amax, fabsf(values.at[j]));
    has_nan |= isnan(values.at[j]);
  }
  if (has_nan) amax = NAN;
  for (int step = lanes / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, amax, step);
    amax = isnan(amax) || isnan(other) ? NAN : fmaxf(amax, other);
  }
  return amax;
}

/// Codes of two values each, and a lane's share of the group's scale.
__device__ void quantize_nvfp4(const QuantizeOutputParams& p, const OutputGroups& groups,
                               std::int64_t t, std::int64_t d, const Values& values, float amax) {
  const std::uint8_t code = E4m3::encode(amax / E2m1::kLargest / groups.scale);
  if (d % groups.size == 0) {
    static_cast<std::uint8_t*>(
        p.output.block_scale.data)[nvfp4_scale_offset(t, d / groups.size, groups.count)] = code;
  }
  const float step = E4m3::decode(code) * groups.scale;
  // Too small for any scale: all codes are zero. A NaN shows in the group's scale.
  const bool zero = step == 0.f || isnan(step);
  std::uint8_t codes[kTogether / 2];
  for (int j = 0; j < kTogether / 2; ++j) {
    codes[j] = zero ? std::uint8_t{0}
                    : static_cast<std::uint8_t>(E2m1::encode(values.at[2 * j] / step) |
                                                E2m1::encode(values.at[2 * j + 1] / step) << 4);
  }
  auto* row = static_cast<std::uint8_t*>(p.output.out.data) + at(p.output.out, t);
  store_codes(codes, row + d / 2, row + p.output.out.shape[1]);
}

__device__ void quantize_fp8(const QuantizeOutputParams& p, const OutputGroups& groups,
                             std::int64_t t, std::int64_t d, const Values& values, float amax) {
  float scale = groups.scale;
  if (groups.kind == OutputQuant::fp8_per_group) {
    scale = isnan(amax) ? amax : fmaxf(amax, kSmallestAmax) / E4m3::kLargest;
    if (p.output.power_of_two_scales) scale = power_of_two_above(scale);
    if (d % groups.size == 0) store_group_scale(p.output.block_scale, t, d / groups.size, scale);
  }
  std::uint8_t codes[kTogether];
  for (int j = 0; j < kTogether; ++j) codes[j] = E4m3::encode(values.at[j] / scale);
  auto* row = static_cast<std::uint8_t*>(p.output.out.data) + at(p.output.out, t);
  store_codes(codes, row + d, row + p.output.out.shape[1]);
}

/// A block per row of out, of which x may have fewer. A thread has kTogether channels at a time, so
/// that a group is that of neighbouring lanes of a warp.
__global__ void quantize_output_kernel(const __grid_constant__ QuantizeOutputParams p,
                                       OutputGroups groups) {
  const std::int64_t t = blockIdx.x;
  if (t < p.x.shape[0]) {
    const ElementRow x(p.x, at(p.x, t));
    for (std::int64_t first = 0; first < x.width(); first += kThreads * kTogether) {
      const std::int64_t d = first + threadIdx.x * kTogether;
      const Values values = x.load(d);
      const float amax = group_amax(values, static_cast<int>(groups.size) / kTogether);
      if (d >= x.width()) continue;
      if (groups.kind == OutputQuant::nvfp4) {
        quantize_nvfp4(p, groups, t, d, values, amax);
      } else {
        quantize_fp8(p, groups, t, d, values, amax);
      }
    }
    return;
  }
  auto* codes = static_cast<std::uint8_t*>(p.output.out.data) + at(p.output.out, t);
  for (std::int64_t i = threadIdx.x; i < p.output.out.shape[1]; i += kThreads) codes[i] = 0;
  if (groups.kind != OutputQuant::fp8_per_group) return;
  for (std::int64_t g = threadIdx.x; g < groups.count; g += kThreads) {
    store_group_scale(p.output.block_scale, t, g, 0.f);
  }
}

/// A block per row of nvfp4's scales: those that belong to no row or to no group.
__global__ void clear_padding_kernel(const __grid_constant__ QuantizeOutputParams p,
                                     OutputGroups groups) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t first = row < p.x.shape[0] ? groups.count : 0;
  for (std::int64_t g = first + threadIdx.x; g < p.output.block_scale.shape[1]; g += kThreads) {
    static_cast<std::uint8_t*>(
        p.output.block_scale.data)[nvfp4_scale_offset(row, g, groups.count)] = 0;
  }
}

OutputGroups groups_of(const QuantizeOutputParams& p) {
  const QuantizedOutput& output = p.output;
  const std::int64_t width = p.x.shape[1];
  const OutputQuant kind = output_quant_of(output, width);
  std::int64_t size = kTogether;  // Where all share one scale: whatever a thread has.
  if (kind == OutputQuant::nvfp4) size = kNvfp4Group;
  if (kind == OutputQuant::fp8_per_group) size = width / output.block_scale.shape[1];
  return {.kind = kind,
          .scale = output.inv_scale != 0.f ? 1.f / output.inv_scale : output.scale,
          .size = size,
          .count = (width + size - 1) / size};
}

}  // namespace

void quantize_query(const OpContext& ctx, const QuantizeQueryParams& p) {
  const std::int64_t heads = p.out.shape[1];
  if (heads == 0) return;
  launch_warps(ctx, p.out.shape[0] * heads, quantize_query_kernel, p, Divisor(heads));
}

void quantize_output(const OpContext& ctx, const QuantizeOutputParams& p) {
  const OutputGroups groups = groups_of(p);
  launch(ctx, p.output.out.shape[0], quantize_output_kernel, p, groups);
  if (groups.kind == OutputQuant::nvfp4) {
    launch(ctx, p.output.block_scale.shape[0], clear_padding_kernel, p, groups);
  }
}

}  // namespace fovea::cuda::plain
