#include <algorithm>
#include <cstring>

#include "linear/plain_kernels.h"
#include "linear/product.h"

namespace fovea {
namespace {

/// Below this many multiplications a second thread costs more than it saves.
constexpr std::int64_t kMinTaskWork = 32 * 1024;
/// Rows of x of one task: with a depth of 1024 they are half of a usual second-level cache.
constexpr std::int64_t kTaskRows = 96;

class PlainProduct final : public DenseProduct {
 public:
  PlainProduct(const ProductShape& shape, const PlainKernels& kernels)
      : DenseProduct(shape),
        kernels_(kernels),
        num_panels_((shape.columns + kPanelColumns - 1) / kPanelColumns),
        packed_(
            Tensor::empty(shape.dtype, {shape.heads, num_panels_, shape.depth, kPanelColumns})) {
    if (shape.has_bias) bias_ = Tensor::empty(DType::f32, {shape.columns});
  }

  std::string_view name() const override { return "plain"; }
  std::int64_t weight_bytes() const override { return packed_.nbytes(); }
  std::int64_t workspace_bytes(std::int64_t tokens) const override {
    if (shape().dtype == DType::f32 || tokens == 0) return 0;
    return Workspace::rounded(scratch_rows(row_bytes(), tokens) * row_bytes());
  }
  void load(const TensorView& weight, const TensorView& bias) override;
  void run(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const override;

 private:
  /// A row of x of all heads, widened.
  std::int64_t row_bytes() const {
    return shape().heads * shape().depth * std::int64_t{sizeof(float)};
  }
  void widen(const ExecutionContext& ctx, const TensorView& x, float* to) const;
  void multiply(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const;
  void multiply(const PanelProduct& product) const;

  const PlainKernels& kernels_;
  std::int64_t num_panels_;
  Tensor packed_;  ///< [N, panels, K, kPanelColumns], see PanelProduct.
  Tensor bias_;    ///< f32 [M]
};

void PlainProduct::load(const TensorView& weight, const TensorView& bias) {
  const ProductShape& s = shape();
  std::memset(packed_.view().data, 0, static_cast<std::size_t>(packed_.nbytes()));
  for (std::int64_t n = 0; n < s.heads; ++n) {
    const TensorView head = weight.select(0, n);  // [K, M]
    for (std::int64_t panel = 0; panel < num_panels_; ++panel) {
      const std::int64_t first = panel * kPanelColumns;
      const std::int64_t columns = std::min(kPanelColumns, s.columns - first);
      TensorView target = packed_.view().select(0, n).select(0, panel);  // [K, 16]
      if (s.dtype != DType::bf16) {
        copy(head.slice(1, first, first + columns), target.slice(1, 0, columns));
        continue;
      }
      target = target.split(1, kPanelColumns / 2, 2);  // Column c is [c % 8, c / 8].
      const std::int64_t low = std::min<std::int64_t>(columns, 8);
      copy(head.slice(1, first, first + low), target.select(2, 0).slice(1, 0, low));
      copy(head.slice(1, first + low, first + columns),
           target.select(2, 1).slice(1, 0, columns - low));
    }
  }
  if (s.has_bias) copy(bias, bias_);
}

void PlainProduct::run(const ExecutionContext& ctx, const TensorView& x,
                       const TensorView& out) const {
  if (shape().dtype == DType::f32) return multiply(ctx, x, out);
  const std::int64_t tokens = x.shape[0];
  const std::int64_t rows = scratch_rows(row_bytes(), tokens);
  WorkspaceScope scope(*ctx.workspace);
  const TensorView scratch = scope.take(DType::f32, {rows, shape().heads, shape().depth});
  for (std::int64_t begin = 0; begin < tokens; begin += rows) {
    const std::int64_t end = std::min(begin + rows, tokens);
    widen(ctx, x.slice(0, begin, end), scratch.ptr<float>());
    multiply(ctx, scratch.slice(0, 0, end - begin), out.slice(0, begin, end));
  }
}

void PlainProduct::widen(const ExecutionContext& ctx, const TensorView& x, float* to) const {
  const ProductShape& s = shape();
  const auto kernel = s.dtype == DType::f16 ? kernels_.widen_f16 : kernels_.widen_bf16;
  const auto widen_row = [&](std::int64_t row) {
    const std::int64_t token = row / s.heads, head = row % s.heads;
    kernel(x.ptr<std::uint16_t>({token, head}), to + row * s.depth, s.depth);
  };
  const std::int64_t rows = x.shape[0] * s.heads;
  const std::int64_t rows_per_task = std::max<std::int64_t>(1, kMinTaskWork / s.depth);
  const std::int64_t tasks = (rows + rows_per_task - 1) / rows_per_task;
  const auto task = [&](std::int64_t i) {
    const std::int64_t end = std::min((i + 1) * rows_per_task, rows);
    for (std::int64_t row = i * rows_per_task; row < end; ++row) widen_row(row);
  };
  if (tasks == 1) {
    task(0);
  } else {
    ctx.pool->run(tasks, task);
  }
}

void PlainProduct::multiply(const ExecutionContext& ctx, const TensorView& x,
                            const TensorView& out) const {
  const ProductShape& s = shape();
  const std::int64_t tokens = x.shape[0];
  const std::int64_t row_groups = (tokens + kTaskRows - 1) / kTaskRows;
  const std::int64_t rows_per_group = (tokens + row_groups - 1) / row_groups;
  // Columns are cut so that every thread gets several tasks, as threads rarely run evenly.
  const std::int64_t wanted = 4 * ctx.pool->num_threads();
  const std::int64_t panel_work = std::min(tokens, rows_per_group) * s.depth * kPanelColumns;
  const std::int64_t panels_per_task =
      std::clamp(std::max(kMinTaskWork / panel_work, s.heads * row_groups * num_panels_ / wanted),
                 std::int64_t{1}, num_panels_);
  const std::int64_t column_groups = (num_panels_ + panels_per_task - 1) / panels_per_task;
  const std::int64_t element_bytes = bytes_of(s.dtype, 1);
  const auto task = [&](std::int64_t i) {
    const std::int64_t column_group = i % column_groups;
    const std::int64_t n = i / column_groups % s.heads;
    const std::int64_t first_row = i / column_groups / s.heads * rows_per_group;
    const std::int64_t first_panel = column_group * panels_per_task;
    const std::int64_t first_column = first_panel * kPanelColumns;
    const std::int64_t last_column =
        std::min((first_panel + panels_per_task) * kPanelColumns, s.columns);
    const std::int64_t panel_offset =
        (n * num_panels_ + first_panel) * s.depth * kPanelColumns * element_bytes;
    const std::int64_t out_offset =
        (first_row * out.strides[0] + n * out.strides[1] + first_column) * element_bytes;
    multiply({.x = x.ptr<float>({first_row, n}),
              .x_stride = x.strides[0],
              .rows = std::min(rows_per_group, tokens - first_row),
              .depth = s.depth,
              .panels = packed_.ptr<std::byte>() + panel_offset,
              .columns = last_column - first_column,
              .bias = bias_ ? bias_.ptr<float>() + first_column : nullptr,
              .out = static_cast<std::byte*>(out.data) + out_offset,
              .out_stride = out.strides[0]});
  };
  const std::int64_t tasks = row_groups * s.heads * column_groups;
  if (tasks == 1) {
    task(0);
  } else {
    ctx.pool->run(tasks, task);
  }
}

void PlainProduct::multiply(const PanelProduct& product) const {
  switch (shape().dtype) {
    case DType::f16:
      return kernels_.multiply_f16(product);
    case DType::bf16:
      return kernels_.multiply_bf16(product);
    default:
      return kernels_.multiply_f32(product);
  }
}

}  // namespace

const PlainKernels& plain_kernels() {
  static const PlainKernels& best = __builtin_cpu_supports("avx2") &&
                                            __builtin_cpu_supports("fma") &&
                                            __builtin_cpu_supports("f16c")
                                        ? kPlainKernelsAvx2
                                        : kPlainKernelsScalar;
  return best;
}

std::unique_ptr<DenseProduct> make_plain_product(const ProductShape& shape) {
  return make_plain_product(shape, plain_kernels());
}

std::unique_ptr<DenseProduct> make_plain_product(const ProductShape& shape,
                                                 const PlainKernels& kernels) {
  return std::make_unique<PlainProduct>(shape, kernels);
}

}  // namespace fovea
