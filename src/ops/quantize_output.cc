#include <cmath>
#include <cstring>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/quantized_output.h"
#include "quant/output_codec.h"

namespace fovea {
namespace {

const char* const kName = kQuantizeOutput.name;

std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

bool has_scale(const QuantizedOutput& output) {
  return output.scale != 0.f || output.inv_scale != 0.f;
}

void check_scale(const QuantizedOutput& output) {
  FOVEA_CHECK(output.scale == 0.f || output.inv_scale == 0.f, invalid_argument,
              "{}: scale is {} and inv_scale {}; at most one must be given", kName, output.scale,
              output.inv_scale);
  const float given = output.scale != 0.f ? output.scale : output.inv_scale;
  FOVEA_CHECK(given >= 0.f && std::isfinite(given), invalid_argument,
              "{}: {} is {}; it must be positive and finite", kName,
              output.scale != 0.f ? "scale" : "inv_scale", given);
  FOVEA_CHECK(output.inv_scale == 0.f || std::isfinite(1 / output.inv_scale), invalid_argument,
              "{}: inv_scale is {}; its inverse must be finite", kName, output.inv_scale);
}

void check_group(std::int64_t output_dim, std::int64_t groups) {
  const bool divides = groups > 0 && output_dim % groups == 0;
  const std::int64_t group = divides ? output_dim / groups : 0;
  FOVEA_CHECK(group == 128 || group == 64, invalid_argument,
              "{}: block_scale has {} groups for output_dim = {}; each must have 128 or 64 of its "
              "channels",
              kName, groups, output_dim);
}

void check_shapes(const QuantizedOutput& output, OutputQuant kind, std::int64_t tokens,
                  std::int64_t width) {
  const Argument out{kName, "out"}, block_scale{kName, "block_scale"};
  const TensorView& scales = output.block_scale;
  switch (kind) {
    case OutputQuant::fp8_per_tensor:
      check_view(out, output.out, {{"T", tokens}, {"D", width}});
      break;
    case OutputQuant::fp8_per_group:
      check_view(out, output.out, {{"T", tokens}, {"D", width}});
      check_view(block_scale, scales, {{"T", tokens}, {"groups"}});
      break;
    case OutputQuant::nvfp4:
      check_view(out, output.out, {{"T", tokens}, {"D / 2", width / 2}});
      check_view(block_scale, scales,
                 {{"rows", round_up(tokens, kNvfp4TileRows)},
                  {"groups", round_up(width / kNvfp4Group, kNvfp4TileGroups)}});
      FOVEA_CHECK(scales.is_contiguous(), invalid_argument,
                  "{}: block_scale is {}; it must be contiguous", kName, to_string(scales));
      break;
  }
}

void validate(const QuantizeOutputParams& p) {
  const Argument x{kName, "x"};
  check_view(x, p.x, {{"T"}, {"D"}});
  check_compute_dtype(x, p.x);
  check_unit_inner_stride(x, p.x);
  check_data(x, p.x);
  const TensorView& out = p.output.out;
  const std::int64_t tokens = out.ndim == 2 ? out.shape[0] : 0;
  check_quantized_output(p.output, tokens, p.x.shape[1]);
  FOVEA_CHECK(p.x.shape[0] <= tokens, invalid_argument,
              "{}: x is {}; it must have at most the {} rows of out", kName, to_string(p.x),
              tokens);
  check_disjoint({kName, "out"}, out, "x", p.x);
  if (p.output.block_scale.ndim == 0) return;
  check_disjoint({kName, "block_scale"}, p.output.block_scale, "x", p.x);
}

}  // namespace

void check_quantized_output(const QuantizedOutput& output, std::int64_t tokens,
                            std::int64_t width) {
  const Argument out{kName, "out"}, block_scale{kName, "block_scale"};
  check_shapes(output, output_quant_of(output, width), tokens, width);
  check_unit_inner_stride(out, output.out);
  check_output(out, output.out);
  if (output.block_scale.ndim == 0) return;
  check_output(block_scale, output.block_scale);
  check_disjoint(block_scale, output.block_scale, "out", output.out);
}

OutputQuant output_quant_of(const QuantizedOutput& output, std::int64_t output_dim) {
  check_scale(output);
  const bool is_fp8 = output.out.dtype == DType::f8e4m3fn;
  const bool has_blocks = output.block_scale.ndim > 0;
  if (!has_blocks) {
    FOVEA_CHECK(is_fp8 && has_scale(output), invalid_argument,
                "{}: out is {} with neither block_scale nor scale; it must be f8e4m3fn with one of "
                "them, or u8 with both",
                kName, to_string(output.out));
    return OutputQuant::fp8_per_tensor;
  }
  const DType scale_dtype = output.block_scale.dtype;
  if (is_fp8) {
    FOVEA_CHECK(!has_scale(output), invalid_argument,
                "{}: scale is given beside block_scale of an FP8 output; it must be absent: each "
                "group has its own",
                kName);
    FOVEA_CHECK(
        scale_dtype == DType::f32 || (scale_dtype == DType::f8e8m0 && output.power_of_two_scales),
        invalid_argument,
        "{}: block_scale is {} {} power_of_two_scales; it must be f32, or f8e8m0 with them", kName,
        name_of(scale_dtype), output.power_of_two_scales ? "with" : "without");
    check_group(output_dim, output.block_scale.ndim == 2 ? output.block_scale.shape[1] : 0);
    return OutputQuant::fp8_per_group;
  }
  FOVEA_CHECK(
      output.out.dtype == DType::u8 && scale_dtype == DType::f8e4m3fn &&
          !output.power_of_two_scales,
      invalid_argument,
      "{}: out is {} with block_scale of {}; it must be f8e4m3fn, or u8 with block_scale of "
      "f8e4m3fn",
      kName, name_of(output.out.dtype), name_of(scale_dtype));
  FOVEA_CHECK(has_scale(output), invalid_argument,
              "{}: scale is absent; nvfp4 must have it or inv_scale (without, this would be mxfp4)",
              kName);
  FOVEA_CHECK(output_dim % kNvfp4Group == 0, invalid_argument,
              "{}: output_dim is {}; it must be a multiple of {} for nvfp4", kName, output_dim,
              kNvfp4Group);
  return OutputQuant::nvfp4;
}

std::array<std::int64_t, 2> tma_aligned_strides(std::int64_t tokens, DType dtype) {
  return {1, round_up(tokens, 16 / bytes_of(dtype, 1))};
}

void quantize_output(const OpContext& ctx, const QuantizeOutputParams& params) {
  check_devices(ctx, kName,
                {{"x", params.x}, {"out", params.output.out},
                 {"block_scale", params.output.block_scale}});
  validate(params);
  run(ctx, select(ctx, kQuantizeOutput, params), params);
}

}  // namespace fovea
