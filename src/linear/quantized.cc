// Products with weights that stay in FP8 or FP4.
#include <algorithm>
#include <cstring>

#include "fovea/linear.h"
#include "fovea/quant.h"
#include "linear/plain_kernels.h"
#include "linear/product.h"

namespace fovea {
namespace {

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
        group_depth_(group_extent(groups.in, shape.depth)),
        num_panels_((shape.columns + kPanelColumns - 1) / kPanelColumns),
        depth_groups_(num_groups(shape.depth, groups.in)),
        codes_(Tensor::empty(DType::u8, {shape.heads, num_panels_, shape.depth,
                                         code_row_bytes(shape.is_mxfp4)})),
        scales_(
            Tensor::empty(DType::f32, {shape.heads, num_panels_, depth_groups_, kPanelColumns})) {
    if (shape.has_bias) bias_ = Tensor::empty(DType::f32, {shape.columns});
  }

  std::string_view name() const override {
    return shape().is_mxfp4 ? "plain/mxfp4" : "plain/fp8";
  }
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
  void load_row(const std::uint8_t* codes, std::uint8_t* panel, std::int64_t column) const;
  void prepare(const TensorView& x, const TensorView& scratch) const;
  void multiply(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const;
  void multiply(const CodeProduct& product) const;

  const PlainKernels& kernels_;
  std::int64_t group_depth_;
  std::int64_t num_panels_;
  std::int64_t depth_groups_;
  Tensor codes_;   ///< u8 [N, panels, K, bytes of a row of codes]
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
  const std::int64_t group_out = group_extent(weight.groups.out, s.columns);
  for (std::int64_t m = 0; m < s.columns; ++m) {
    const std::int64_t panel = m / kPanelColumns, column = m % kPanelColumns;
    load_row(weight.codes.ptr<std::uint8_t>({m, 0}), codes_.ptr<std::uint8_t>({head, panel, 0, 0}),
             column);
    for (std::int64_t g = 0; g < depth_groups_; ++g) {
      *scales_.ptr<float>({head, panel, g, column}) = scale_at(weight.scale, m / group_out, g);
    }
  }
}

/// Codes [K] of an output into column `column` of a panel, all zero there.
void PlainQuantizedProduct::load_row(const std::uint8_t* codes, std::uint8_t* panel,
                                     std::int64_t column) const {
  const std::int64_t depth = shape().depth, row_bytes = code_row_bytes(shape().is_mxfp4);
  if (!shape().is_mxfp4) {
    for (std::int64_t k = 0; k < depth; ++k) panel[k * row_bytes + column] = codes[k];
    return;
  }
  // Column c and c + 8 share a byte.
  const std::int64_t byte = column % row_bytes, shift = column / row_bytes * 4;
  for (std::int64_t k = 0; k < depth; ++k) {
    const int code = codes[k / 2] >> (k % 2 * 4) & 0xf;
    panel[k * row_bytes + byte] |= static_cast<std::uint8_t>(code << shift);
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
         .is_mxfp4 = s.is_mxfp4,
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

}  // namespace

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
