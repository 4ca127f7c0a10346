#include "ops/output_rows.h"

#include <algorithm>
#include <cstring>

#include "core/float_bits.h"
#include "fovea/quant.h"
#include "quant/output_codec.h"

namespace fovea {

namespace {

/// 0 when groups have their own.
float scale_of(const QuantizedOutput& output) {
  return output.inv_scale != 0.f ? 1.f / output.inv_scale : output.scale;
}

}  // namespace

OutputRows::OutputRows(const QuantizeOutputParams& params)
    : params_(params),
      kind_(output_quant_of(params.output, params.x.shape[1])),
      scale_(scale_of(params.output)) {
  const std::int64_t width = params.x.shape[1];
  switch (kind_) {
    case OutputQuant::fp8_per_tensor:
      group_size_ = kMaxGroup;
      break;
    case OutputQuant::fp8_per_group:
      group_size_ = width / params.output.block_scale.shape[1];
      break;
    case OutputQuant::nvfp4:
      group_size_ = kNvfp4Group;
      break;
  }
  num_groups_ = (width + group_size_ - 1) / group_size_;
}

std::span<std::byte> OutputRows::codes(std::int64_t t, std::int64_t begin,
                                       std::int64_t count) const {
  const TensorView& out = params_.output.out;
  auto* row = static_cast<std::byte*>(out.data) + t * out.strides[0];
  const std::int64_t per_byte = kind_ == OutputQuant::nvfp4 ? 2 : 1;
  return {row + begin / per_byte, static_cast<std::size_t>(count / per_byte)};
}

void OutputRows::write_group_scale(std::int64_t t, std::int64_t group, float scale) const {
  const TensorView& scales = params_.output.block_scale;
  const std::int64_t offset = t * scales.strides[0] + group * scales.strides[1];
  if (scales.dtype == DType::f32) {
    static_cast<float*>(scales.data)[offset] = scale;
  } else {
    static_cast<std::uint8_t*>(scales.data)[offset] =
        scale == 0.f ? std::uint8_t{0} : narrow<Float8E8M0>(scale).bits;
  }
}

void OutputRows::write_group(std::int64_t t, std::int64_t group,
                             std::span<const float> values) const {
  const std::span<std::byte> to = codes(t, group_begin(group), std::ssize(values));
  switch (kind_) {
    case OutputQuant::fp8_per_tensor:
      quantize_group(DType::f8e4m3fn, values, scale_, to);
      break;
    case OutputQuant::fp8_per_group: {
      const float scale = fp8_group_scale(values, params_.output.power_of_two_scales);
      quantize_group(DType::f8e4m3fn, values, scale, to);
      write_group_scale(t, group, scale);
      break;
    }
    case OutputQuant::nvfp4: {
      auto* scales = static_cast<std::uint8_t*>(params_.output.block_scale.data);
      scales[nvfp4_scale_offset(t, group, num_groups_)] = encode_nvfp4_group(values, scale_, to);
      break;
    }
  }
}

void OutputRows::clear(std::int64_t t) const {
  const std::span<std::byte> row = codes(t, 0, params_.x.shape[1]);
  std::fill(row.begin(), row.end(), std::byte{0});
  if (kind_ != OutputQuant::fp8_per_group) return;
  for (std::int64_t g = 0; g < num_groups_; ++g) write_group_scale(t, g, 0.f);
}

void OutputRows::clear_padding() const {
  if (kind_ != OutputQuant::nvfp4) return;
  const TensorView& scales = params_.output.block_scale;
  for (std::int64_t row = 0; row < scales.shape[0]; ++row) {
    const std::int64_t first = row < params_.x.shape[0] ? num_groups_ : 0;
    for (std::int64_t g = first; g < scales.shape[1]; ++g) {
      static_cast<std::uint8_t*>(scales.data)[nvfp4_scale_offset(row, g, num_groups_)] = 0;
    }
  }
}

}  // namespace fovea
