// Products with weights that stay in FP8.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "core/float_bits.h"
#include "fovea/linear.h"
#include "fovea/quant.h"
#include "linear/plain_kernels.h"
#include "linear/product.h"

namespace fovea {
namespace {

/// The extent that 0 stands for, filled in.
std::int64_t filled(std::int64_t group, std::int64_t extent) { return group > 0 ? group : extent; }

std::int64_t num_groups(std::int64_t extent, std::int64_t group) {
  return (extent + filled(group, extent) - 1) / filled(group, extent);
}

float scale_at(const TensorView& scale, std::int64_t i, std::int64_t j) {
  switch (scale.dtype) {
    case DType::f16:
      return to_float(*scale.ptr<Float16>({i, j}));
    case DType::bf16:
      return to_float(*scale.ptr<BFloat16>({i, j}));
    default:
      return *scale.ptr<float>({i, j});
  }
}

/// Rounds the `depth` values of a row to FP8, in groups with a scale each.
void round_to_fp8(float* row, std::int64_t depth, std::int64_t group_depth) {
  constexpr std::int64_t kPiece = 256;  // Codes on the stack.
  std::byte codes[kPiece];
  for (std::int64_t begin = 0; begin < depth; begin += group_depth) {
    const std::int64_t end = std::min(begin + group_depth, depth);
    const float scale =
        group_scale(DType::f8e4m3fn, {row + begin, static_cast<std::size_t>(end - begin)});
    for (std::int64_t k = begin; k < end; k += kPiece) {
      const auto count = static_cast<std::size_t>(std::min(kPiece, end - k));
      quantize_group(DType::f8e4m3fn, {row + k, count}, scale, {codes, count});
      dequantize_group(DType::f8e4m3fn, {codes, count}, scale, {row + k, count});
    }
  }
}

class PlainQuantizedProduct final : public QuantizedProduct {
 public:
  PlainQuantizedProduct(const ProductShape& shape, const WeightGroups& groups,
                        const PlainKernels& kernels)
      : QuantizedProduct(shape),
        kernels_(kernels),
        group_depth_(filled(groups.in, shape.depth)),
        num_panels_((shape.columns + kPanelColumns - 1) / kPanelColumns),
        depth_groups_(num_groups(shape.depth, groups.in)),
        codes_(Tensor::empty(DType::u8, {shape.heads, num_panels_, shape.depth, kPanelColumns})),
        scales_(
            Tensor::empty(DType::f32, {shape.heads, num_panels_, depth_groups_, kPanelColumns})) {
    if (shape.has_bias) bias_ = Tensor::empty(DType::f32, {shape.columns});
  }

  std::string_view name() const override { return "plain/fp8"; }
  std::int64_t weight_bytes() const override { return codes_.nbytes() + scales_.nbytes(); }
  std::int64_t workspace_bytes(std::int64_t tokens) const override {
    if (reads_x_as_it_is() || tokens == 0) return 0;
    return Workspace::rounded(scratch_rows(row_bytes(), tokens) * row_bytes());
  }
  void load(std::span<const QuantizedWeight> heads, const TensorView& bias) override;
  void run(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const override;

 private:
  bool reads_x_as_it_is() const { return shape().dtype == DType::f32 && !shape().quantizes_x; }
  /// A row of x for all heads, widened.
  std::int64_t row_bytes() const {
    return shape().heads * shape().depth * std::int64_t{sizeof(float)};
  }
  void load_head(std::int64_t head, const QuantizedWeight& weight);
  void prepare(const TensorView& x, const TensorView& scratch) const;
  void multiply(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const;
  void multiply(const CodeProduct& product) const;

  const PlainKernels& kernels_;
  std::int64_t group_depth_;
  std::int64_t num_panels_;
  std::int64_t depth_groups_;
  Tensor codes_;   ///< u8 [N, panels, K, kPanelColumns]
  Tensor scales_;  ///< f32 [N, panels, groups of K, kPanelColumns]
  Tensor bias_;    ///< f32 [M]
};

void PlainQuantizedProduct::load(std::span<const QuantizedWeight> heads, const TensorView& bias) {
  std::memset(codes_.view().data, 0, static_cast<std::size_t>(codes_.nbytes()));
  std::memset(scales_.view().data, 0, static_cast<std::size_t>(scales_.nbytes()));
  for (std::size_t n = 0; n < heads.size(); ++n) {
    load_head(static_cast<std::int64_t>(n), heads[n]);
  }
  if (shape().has_bias) copy(bias, bias_);
}

void PlainQuantizedProduct::load_head(std::int64_t head, const QuantizedWeight& weight) {
  const ProductShape& s = shape();
  const std::int64_t group_out = filled(weight.groups.out, s.columns);
  for (std::int64_t m = 0; m < s.columns; ++m) {
    const std::int64_t panel = m / kPanelColumns, column = m % kPanelColumns;
    const auto* row = weight.codes.ptr<std::uint8_t>({m, 0});
    auto* to = codes_.ptr<std::uint8_t>({head, panel, 0, column});
    for (std::int64_t k = 0; k < s.depth; ++k) to[k * kPanelColumns] = row[k];
    for (std::int64_t g = 0; g < depth_groups_; ++g) {
      *scales_.ptr<float>({head, panel, g, column}) = scale_at(weight.scale, m / group_out, g);
    }
  }
}

/// A row [N, K] of x in f32.
void PlainQuantizedProduct::prepare(const TensorView& x, const TensorView& scratch) const {
  const ProductShape& s = shape();
  for (std::int64_t n = 0; n < s.heads; ++n) {
    float* row = scratch.ptr<float>({n, 0});
    switch (s.dtype) {
      case DType::f16:
        kernels_.widen_f16(x.ptr<std::uint16_t>({n, 0}), row, s.depth);
        break;
      case DType::bf16:
        kernels_.widen_bf16(x.ptr<std::uint16_t>({n, 0}), row, s.depth);
        break;
      default:
        std::copy_n(x.ptr<float>({n, 0}), s.depth, row);
        break;
    }
    if (s.quantizes_x) round_to_fp8(row, s.depth, group_depth_);
  }
}

void PlainQuantizedProduct::run(const ExecutionContext& ctx, const TensorView& x,
                                const TensorView& out) const {
  if (reads_x_as_it_is()) return multiply(ctx, x, out);
  const std::int64_t tokens = x.shape[0];
  const std::int64_t step = scratch_rows(row_bytes(), tokens);
  WorkspaceScope scope(*ctx.workspace);
  const TensorView scratch = scope.take(DType::f32, {step, shape().heads, shape().depth});
  for (std::int64_t begin = 0; begin < tokens; begin += step) {
    const std::int64_t end = std::min(begin + step, tokens);
    const auto prepare_row = [&](std::int64_t t) {
      prepare(x.select(0, begin + t), scratch.select(0, t));
    };
    if (shape().quantizes_x) {
      ctx.pool->run(end - begin, prepare_row);
    } else {
      // Widening is too little work to wake threads for.
      for (std::int64_t t = 0; t < end - begin; ++t) prepare_row(t);
    }
    multiply(ctx, scratch.slice(0, 0, end - begin), out.slice(0, begin, end));
  }
}

/// x [T, N, K] in f32.
void PlainQuantizedProduct::multiply(const ExecutionContext& ctx, const TensorView& x,
                                     const TensorView& out) const {
  const ProductShape& s = shape();
  const std::int64_t tokens = x.shape[0];
  const std::int64_t row_groups = (tokens + kCodeRows - 1) / kCodeRows;
  // Columns are cut so that every thread gets several tasks, as threads rarely run evenly.
  const std::int64_t wanted =
      std::max<std::int64_t>(1, 4 * ctx.pool->num_threads() / (s.heads * row_groups));
  const std::int64_t column_groups = std::min(wanted, num_panels_);
  const std::int64_t element_bytes = bytes_of(s.dtype, 1);
  ctx.pool->run(s.heads * row_groups * column_groups, [&](std::int64_t i) {
    const std::int64_t group = i % column_groups;
    const std::int64_t head = i / (column_groups * row_groups);
    const std::int64_t first_row = i / column_groups % row_groups * kCodeRows;
    const std::int64_t first_panel = group * num_panels_ / column_groups;
    const std::int64_t last_panel = (group + 1) * num_panels_ / column_groups;
    const std::int64_t first_column = first_panel * kPanelColumns;
    multiply(
        {.x = x.ptr<float>({first_row, head, 0}),
         .x_stride = x.strides[0],
         .rows = std::min(kCodeRows, tokens - first_row),
         .depth = s.depth,
         .codes = codes_.ptr<std::uint8_t>({head, first_panel, 0, 0}),
         .scales = scales_.ptr<float>({head, first_panel, 0, 0}),
         .group_depth = group_depth_,
         .columns = std::min(last_panel * kPanelColumns, s.columns) - first_column,
         .bias = bias_ ? bias_.ptr<float>() + first_column : nullptr,
         .out = static_cast<std::byte*>(out.data) +
                (first_row * out.strides[0] + head * out.strides[1] + first_column) * element_bytes,
         .out_stride = out.strides[0]});
  });
}

void PlainQuantizedProduct::multiply(const CodeProduct& product) const {
  switch (shape().dtype) {
    case DType::f16:
      return kernels_.multiply_codes_f16(product);
    case DType::bf16:
      return kernels_.multiply_codes_bf16(product);
    default:
      return kernels_.multiply_codes_f32(product);
  }
}

template <class T>
void dequantize_rows(const QuantizedWeight& weight, const TensorView& out) {
  const std::int64_t rows = weight.codes.shape[0], columns = weight.codes.shape[1];
  const std::int64_t group_out = filled(weight.groups.out, rows);
  const std::int64_t group_in = filled(weight.groups.in, columns);
  for (std::int64_t m = 0; m < rows; ++m) {
    const auto* codes = weight.codes.ptr<Float8E4M3FN>({m, 0});
    T* row = out.ptr<T>({m, 0});
    for (std::int64_t k = 0; k < columns; ++k) {
      row[k] = narrow<T>(widen(codes[k]) * scale_at(weight.scale, m / group_out, k / group_in));
    }
  }
}

void check_groups(const WeightGroups& groups) {
  FOVEA_CHECK(groups.out >= 0 && groups.in >= 0, invalid_argument,
              "groups are [{}, {}], but must not be negative", groups.out, groups.in);
}

}  // namespace

void check_quantized_weight(const QuantizedWeight& weight) {
  const TensorView& codes = weight.codes;
  FOVEA_CHECK(codes && codes.ndim == 2 && codes.shape[0] > 0 && codes.shape[1] > 0 &&
                  codes.dtype == DType::f8e4m3fn && (codes.strides[1] == 1 || codes.shape[1] == 1),
              invalid_argument,
              "codes is {}, but must be f8e4m3fn[out_features, in_features] with unit innermost "
              "stride",
              to_string(codes));
  check_groups(weight.groups);
  const std::int64_t rows = num_groups(codes.shape[0], weight.groups.out);
  const std::int64_t columns = num_groups(codes.shape[1], weight.groups.in);
  FOVEA_CHECK(
      weight.scale && weight.scale.ndim == 2 && weight.scale.shape[0] == rows &&
          weight.scale.shape[1] == columns && is_compute_dtype(weight.scale.dtype),
      invalid_argument,
      "scale is {}, but must be f32, f16 or bf16 [{}, {}]: one for each group of [{}, {}] of "
      "codes {}",
      to_string(weight.scale), rows, columns, filled(weight.groups.out, codes.shape[0]),
      filled(weight.groups.in, codes.shape[1]), to_string(codes));
}

Tensor dequantize_weight(const QuantizedWeight& weight, DType dtype) {
  check_quantized_weight(weight);
  FOVEA_CHECK(is_compute_dtype(dtype), invalid_argument,
              "dtype is {}, but must be f32, f16 or bf16", name_of(dtype));
  Tensor out = Tensor::empty(dtype, {weight.codes.shape[0], weight.codes.shape[1]});
  switch (dtype) {
    case DType::f16:
      dequantize_rows<Float16>(weight, out);
      break;
    case DType::bf16:
      dequantize_rows<BFloat16>(weight, out);
      break;
    default:
      dequantize_rows<float>(weight, out);
      break;
  }
  return out;
}

OwnedQuantizedWeight quantize_weight(const TensorView& weight, const WeightGroups& groups) {
  FOVEA_CHECK(weight && weight.ndim == 2 && weight.shape[0] > 0 && weight.shape[1] > 0 &&
                  is_compute_dtype(weight.dtype),
              invalid_argument,
              "weight is {}, but must be f32, f16 or bf16 [out_features, in_features]",
              to_string(weight));
  check_groups(groups);
  const std::int64_t rows = weight.shape[0], columns = weight.shape[1];
  const std::int64_t group_out = filled(groups.out, rows), group_in = filled(groups.in, columns);
  OwnedQuantizedWeight result{.codes = Tensor::empty(DType::f8e4m3fn, {rows, columns}),
                              .scale = Tensor::empty(DType::f32, {num_groups(rows, groups.out),
                                                                  num_groups(columns, groups.in)}),
                              .groups = groups};
  std::vector<float> values;
  for (std::int64_t i = 0; i < rows; i += group_out) {
    for (std::int64_t j = 0; j < columns; j += group_in) {
      const TensorView group = weight.slice(0, i, std::min(i + group_out, rows))
                                   .slice(1, j, std::min(j + group_in, columns));
      values.resize(static_cast<std::size_t>(group.numel()));
      copy(group, TensorView::of(values.data(), {group.shape[0], group.shape[1]}));
      const float scale = group_scale(DType::f8e4m3fn, values);
      *result.scale.ptr<float>({i / group_out, j / group_in}) = scale;
      const auto width = static_cast<std::size_t>(group.shape[1]);
      for (std::int64_t m = 0; m < group.shape[0]; ++m) {
        quantize_group(DType::f8e4m3fn,
                       std::span(values).subspan(static_cast<std::size_t>(m) * width, width), scale,
                       {result.codes.ptr<std::byte>({i + m, j}), width});
      }
    }
  }
  return result;
}

std::unique_ptr<QuantizedProduct> make_quantized_product(const ProductShape& shape,
                                                         const WeightGroups& groups) {
  return make_quantized_product(shape, groups, plain_kernels());
}

std::unique_ptr<QuantizedProduct> make_quantized_product(const ProductShape& shape,
                                                         const WeightGroups& groups,
                                                         const PlainKernels& kernels) {
  return std::make_unique<PlainQuantizedProduct>(shape, groups, kernels);
}

}  // namespace fovea
