// Queries and outputs as codes.
#include "backends/cuda/plain/block.cuh"
#include "backends/cuda/plain/elements.cuh"
#include "backends/cuda/plain/kernels.h"
#include "quant/output_codec.h"
#include "quant/power_of_two.h"

namespace fovea::cuda::plain {
namespace {

using E4m3 = FloatCode<Float8E4M3FN>;
using E2m1 = FloatCode<Float4E2M1>;

/// A block per token and head.
__global__ void quantize_query_kernel(QuantizeQueryParams p) {
  const std::int64_t t = blockIdx.x / p.out.shape[1];
  const std::int64_t n = blockIdx.x % p.out.shape[1];
  const std::int64_t latent = p.q_latent.shape[2];
  for (std::int64_t i = threadIdx.x; i < p.out.shape[2]; i += kThreads) {
    const TensorView& part = i < latent ? p.q_latent : p.q_pe;
    const float value = load(part.data, part.dtype, at(part, t, n, i < latent ? i : i - latent));
    static_cast<std::uint8_t*>(p.out.data)[at(p.out, t, n, i)] = E4m3::encode(value / p.scale);
  }
}

struct OutputGroups {
  OutputQuant kind;
  float scale;  ///< Of stored values; unless groups have their own.
  std::int64_t size;
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

/// Scale and codes of one group, as OutputRows::write_group.
__device__ void quantize_group(const QuantizeOutputParams& p, const OutputGroups& groups,
                               std::int64_t t, std::int64_t group) {
  const std::int64_t begin = group * groups.size;
  const std::int64_t end = min(begin + groups.size, p.x.shape[1]);
  const auto value = [&](std::int64_t d) { return load(p.x.data, p.x.dtype, at(p.x, t, d)); };
  float amax = 0.f;  // Of the finite values; NaN when a value is.
  for (std::int64_t d = begin; d < end; ++d) {
    const float x = value(d);
    if (isnan(x)) {
      amax = x;
      break;
    }
    if (isfinite(x)) amax = fmaxf(amax, fabsf(x));
  }
  auto* codes = static_cast<std::uint8_t*>(p.output.out.data) + at(p.output.out, t);
  if (groups.kind == OutputQuant::nvfp4) {
    const std::uint8_t code = E4m3::encode(amax / E2m1::kLargest / groups.scale);
    static_cast<std::uint8_t*>(
        p.output.block_scale.data)[nvfp4_scale_offset(t, group, groups.count)] = code;
    const float step = E4m3::decode(code) * groups.scale;
    // Too small for any scale: all codes are zero. A NaN shows in the group's scale.
    const bool zero = step == 0.f || isnan(step);
    for (std::int64_t d = begin; d < end; d += 2) {
      codes[d / 2] = zero ? std::uint8_t{0}
                          : static_cast<std::uint8_t>(E2m1::encode(value(d) / step) |
                                                      E2m1::encode(value(d + 1) / step) << 4);
    }
    return;
  }
  float scale = groups.scale;
  if (groups.kind == OutputQuant::fp8_per_group) {
    scale = isnan(amax) ? amax : fmaxf(amax, kSmallestAmax) / E4m3::kLargest;
    if (p.output.power_of_two_scales) scale = power_of_two_above(scale);
    store_group_scale(p.output.block_scale, t, group, scale);
  }
  for (std::int64_t d = begin; d < end; ++d) codes[d] = E4m3::encode(value(d) / scale);
}

/// A block per row of out, of which x may have fewer; a thread per group.
__global__ void quantize_output_kernel(QuantizeOutputParams p, OutputGroups groups) {
  const std::int64_t t = blockIdx.x;
  if (t < p.x.shape[0]) {
    for (std::int64_t g = threadIdx.x; g < groups.count; g += kThreads) {
      quantize_group(p, groups, t, g);
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
__global__ void clear_padding_kernel(QuantizeOutputParams p, OutputGroups groups) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t first = row < p.x.shape[0] ? groups.count : 0;
  for (std::int64_t g = first + threadIdx.x; g < p.output.block_scale.shape[1]; g += kThreads) {
    static_cast<std::uint8_t*>(
        p.output.block_scale.data)[nvfp4_scale_offset(row, g, groups.count)] = 0;
  }
}

OutputGroups groups_of(const QuantizeOutputParams& p) {
  constexpr std::int64_t kPiece = 128;  // Channels of a thread where all share one scale.
  const QuantizedOutput& output = p.output;
  const std::int64_t width = p.x.shape[1];
  const OutputQuant kind = output_quant_of(output, width);
  std::int64_t size = kPiece;
  if (kind == OutputQuant::nvfp4) size = kNvfp4Group;
  if (kind == OutputQuant::fp8_per_group) size = width / output.block_scale.shape[1];
  return {.kind = kind,
          .scale = output.inv_scale != 0.f ? 1.f / output.inv_scale : output.scale,
          .size = size,
          .count = (width + size - 1) / size};
}

}  // namespace

void quantize_query(const OpContext& ctx, const QuantizeQueryParams& p) {
  launch(ctx, p.out.shape[0] * p.out.shape[1], quantize_query_kernel, p);
}

void quantize_output(const OpContext& ctx, const QuantizeOutputParams& p) {
  const OutputGroups groups = groups_of(p);
  launch(ctx, p.output.out.shape[0], quantize_output_kernel, p, groups);
  if (groups.kind == OutputQuant::nvfp4) {
    launch(ctx, p.output.block_scale.shape[0], clear_padding_kernel, p, groups);
  }
}

}  // namespace fovea::cuda::plain
