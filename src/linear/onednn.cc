// Products by oneDNN 2.6 (Debian 12) or 3.x. The differences are in make_descriptor alone.
#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <dnnl.hpp>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "core/check.h"
#include "linear/product.h"

namespace fovea {
namespace {

using Dims = dnnl::memory::dims;
using Tag = dnnl::memory::format_tag;
using MemoryDesc = dnnl::memory::desc;

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

dnnl::memory::data_type to_onednn(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return dnnl::memory::data_type::f16;
    case DType::bf16:
      return dnnl::memory::data_type::bf16;
    default:
      return dnnl::memory::data_type::f32;
  }
}

struct Operands {
  MemoryDesc x, weight, bias, out;
  bool has_bias;
};

/// Null when nothing here takes the operands.
std::optional<dnnl::matmul::primitive_desc> make_descriptor(const Operands& o) {
  try {
#if DNNL_VERSION_MAJOR >= 3
    return o.has_bias ? dnnl::matmul::primitive_desc(engine(), o.x, o.weight, o.bias, o.out)
                      : dnnl::matmul::primitive_desc(engine(), o.x, o.weight, o.out);
#else
    return dnnl::matmul::primitive_desc(o.has_bias
                                            ? dnnl::matmul::desc(o.x, o.weight, o.bias, o.out)
                                            : dnnl::matmul::desc(o.x, o.weight, o.out),
                                        engine());
#endif
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_unimplemented) return std::nullopt;
    throw;
  }
}

bool is_reference(const dnnl::matmul::primitive_desc& descriptor) {
  return std::string_view(descriptor.impl_info_str()).starts_with("ref");
}

/// OpenMP's team for oneDNN, which asks for it when it plans and when it runs, and must get the
/// same answer. The caller's setting comes back.
class TeamSize {
 public:
  explicit TeamSize(int num_threads) : before_(omp_get_max_threads()) {
    if (num_threads != before_) omp_set_num_threads(num_threads);
  }
  ~TeamSize() { omp_set_num_threads(before_); }
  TeamSize(const TeamSize&) = delete;
  TeamSize& operator=(const TeamSize&) = delete;

 private:
  int before_;
};

/// What a primitive is made for.
struct CallShape {
  std::int64_t tokens;
  int num_threads;
  bool operator==(const CallShape&) const = default;
};

struct Call {
  CallShape shape;
  MemoryDesc x, out;
  dnnl::matmul primitive;
};

/// Calls seen, found without a lock. It never evicts: steps repeat few row counts. Those that come
/// when it is full are made anew each time, and then oneDNN's own cache answers.
class CallCache {
 public:
  ~CallCache() {
    for (std::atomic<const Call*>& slot : slots_) delete slot.load();
  }
  const Call* find(const CallShape& shape) const {
    for (const std::atomic<const Call*>& slot : slots_) {
      const Call* call = slot.load(std::memory_order_acquire);
      if (call == nullptr) return nullptr;
      if (call->shape == shape) return call;
    }
    return nullptr;
  }
  /// Takes `call` over unless there is no room.
  void keep(std::unique_ptr<const Call>& call) {
    for (std::atomic<const Call*>& slot : slots_) {
      const Call* empty = nullptr;
      if (slot.compare_exchange_strong(empty, call.get(), std::memory_order_acq_rel)) {
        call.release();
        return;
      }
    }
  }

 private:
  std::array<std::atomic<const Call*>, 64> slots_{};
};

/// [T, N, D] row-major without gaps; the stride of a single row does not count.
bool is_dense(const TensorView& view) {
  const std::int64_t width = view.shape[2];
  return (view.shape[1] == 1 || view.strides[1] == width) &&
         (view.shape[0] == 1 || view.strides[0] == view.shape[1] * width);
}

void copy_rows(const ExecutionContext& ctx, const TensorView& from, const TensorView& to) {
  ctx.pool->run(from.shape[0],
                [&](std::int64_t row) { copy(from.select(0, row), to.select(0, row)); });
}

class OneDnnProduct final : public DenseProduct {
 public:
  explicit OneDnnProduct(const ProductShape& shape);

  std::string_view name() const override { return name_; }
  std::int64_t weight_bytes() const override {
    return static_cast<std::int64_t>(weight_desc_.get_size());
  }
  std::int64_t workspace_bytes(std::int64_t tokens) const override;
  void load(const TensorView& weight, const TensorView& bias) override;
  void run(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const override;

  /// Where oneDNN has kernels with a layout of their own (AVX-512 and up) in the weights' dtype.
  /// Elsewhere the plain loops are faster, and keep 16-bit weights 16 bits wide.
  bool is_fastest() const { return has_own_layout_ && !converts(); }

 private:
  bool converts() const { return compute_dtype_ != shape().dtype; }
  Operands operands(std::int64_t tokens, const MemoryDesc& weight, DType dtype) const;
  std::optional<dnnl::matmul::primitive_desc> describe_packing(DType dtype) const;
  std::unique_ptr<const Call> make_call(const CallShape& shape) const;
  std::int64_t x_row_bytes() const {
    return bytes_of(compute_dtype_, shape().heads * shape().depth);
  }
  std::int64_t out_row_bytes() const {
    return bytes_of(compute_dtype_, shape().heads * shape().columns);
  }
  void multiply(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const;
  void multiply_block(const ExecutionContext& ctx, const TensorView& x,
                      const TensorView& out) const;

  DType compute_dtype_;
  bool has_own_layout_ = false;
  std::string_view name_;
  MemoryDesc weight_desc_;
  Tensor packed_;
  Tensor bias_;  ///< f32 [M]
  mutable CallCache calls_;
};

/// x [T, K] and out [T, M] for one head; [N, T, K] and [N, T, M] for several, where heads of a
/// token lie side by side. Dense: for rows further apart oneDNN 2.6 has its reference loops only,
/// which are a thousand times slower.
Operands OneDnnProduct::operands(std::int64_t tokens, const MemoryDesc& weight, DType dtype) const {
  const ProductShape& s = shape();
  const auto type = to_onednn(dtype);
  const auto f32 = dnnl::memory::data_type::f32;
  if (s.heads == 1) {
    return {{Dims{tokens, s.depth}, type, Tag::ab},
            weight,
            {Dims{1, s.columns}, f32, Tag::ab},
            {Dims{tokens, s.columns}, type, Tag::ab},
            s.has_bias};
  }
  return {{Dims{s.heads, tokens, s.depth}, type, Tag::bac},
          weight,
          {},
          {Dims{s.heads, tokens, s.columns}, type, Tag::bac},
          false};
}

/// The layout that oneDNN prefers for the weights, found with a batch between decode and prefill.
std::optional<dnnl::matmul::primitive_desc> OneDnnProduct::describe_packing(DType dtype) const {
  constexpr std::int64_t kTokens = 64;
  const ProductShape& s = shape();
  const MemoryDesc any(s.heads == 1 ? Dims{s.depth, s.columns} : Dims{s.heads, s.depth, s.columns},
                       to_onednn(dtype), Tag::any);
  return make_descriptor(operands(kTokens, any, dtype));
}

OneDnnProduct::OneDnnProduct(const ProductShape& shape)
    : DenseProduct(shape), compute_dtype_(shape.dtype) {
  auto descriptor = describe_packing(compute_dtype_);
  if (compute_dtype_ != DType::f32 && (!descriptor || is_reference(*descriptor))) {
    compute_dtype_ = DType::f32;
    descriptor = describe_packing(compute_dtype_);
  }
  FOVEA_CHECK(descriptor.has_value(), unsupported,
              "oneDNN has no matmul for {} heads of [{}, {}] on this processor", shape.heads,
              shape.depth, shape.columns);
  has_own_layout_ = std::string_view(descriptor->impl_info_str()).starts_with("brg");
  name_ = compute_dtype_ == DType::f32   ? "onednn/f32"
          : compute_dtype_ == DType::f16 ? "onednn/f16"
                                         : "onednn/bf16";
  weight_desc_ = descriptor->weights_desc();
}

void OneDnnProduct::load(const TensorView& weight, const TensorView& bias) {
  const ProductShape& s = shape();
  if (!packed_) {
    packed_ = Tensor::empty(DType::u8, {weight_bytes()});
    if (s.has_bias) bias_ = Tensor::empty(DType::f32, {s.columns});
  }
  Tensor dense = Tensor::empty(compute_dtype_, {s.heads, s.depth, s.columns});
  copy(weight, dense);
  const MemoryDesc dense_desc(
      s.heads == 1 ? Dims{s.depth, s.columns} : Dims{s.heads, s.depth, s.columns},
      to_onednn(compute_dtype_), s.heads == 1 ? Tag::ab : Tag::abc);
  dnnl::memory source(dense_desc, engine(), dense.view().data);
  dnnl::memory target(weight_desc_, engine(), packed_.view().data);
  dnnl::stream stream(engine());
  dnnl::reorder(source, target).execute(stream, source, target);
  stream.wait();
  if (s.has_bias) copy(bias, bias_);
}

std::int64_t OneDnnProduct::workspace_bytes(std::int64_t tokens) const {
  if (tokens == 0) return 0;
  const std::int64_t rows = scratch_rows(x_row_bytes() + out_row_bytes(), tokens);
  return Workspace::rounded(rows * x_row_bytes()) + Workspace::rounded(rows * out_row_bytes());
}

/// Operands that are not dense or of another dtype go through scratch, a block of rows at a time.
void OneDnnProduct::run(const ExecutionContext& ctx, const TensorView& x,
                        const TensorView& out) const {
  const ProductShape& s = shape();
  const std::int64_t tokens = x.shape[0];
  const std::int64_t scratch = scratch_rows(x_row_bytes() + out_row_bytes(), tokens);
  // Taken whatever the operands are, so that the scratch is known from the tokens alone.
  WorkspaceScope scope(*ctx.workspace);
  const TensorView scratch_x = scope.take(compute_dtype_, {scratch, s.heads, s.depth});
  const TensorView scratch_out = scope.take(compute_dtype_, {scratch, s.heads, s.columns});
  const bool copies_x = converts() || !is_dense(x);
  const bool copies_out = converts() || !is_dense(out);
  const std::int64_t rows = copies_x || copies_out ? scratch : tokens;
  for (std::int64_t begin = 0; begin < tokens; begin += rows) {
    const std::int64_t end = std::min(begin + rows, tokens);
    const TensorView x_rows = x.slice(0, begin, end), out_rows = out.slice(0, begin, end);
    const TensorView dense_x = copies_x ? scratch_x.slice(0, 0, end - begin) : x_rows;
    const TensorView dense_out = copies_out ? scratch_out.slice(0, 0, end - begin) : out_rows;
    if (copies_x) copy_rows(ctx, x_rows, dense_x);
    multiply(ctx, dense_x, dense_out);
    if (copies_out) copy_rows(ctx, dense_out, out_rows);
  }
}

/// In blocks of a few row counts. oneDNN 2.6 multiplies 61 rows of bf16 ten times slower than 64:
/// it cuts rows evenly or not at all. And a primitive is made once for each row count.
void OneDnnProduct::multiply(const ExecutionContext& ctx, const TensorView& x,
                             const TensorView& out) const {
  const std::int64_t tokens = x.shape[0];
  if (compute_dtype_ == DType::f32) return multiply_block(ctx, x, out);
  constexpr std::int64_t kMostRows = 512, kRows = 64;
  for (std::int64_t begin = 0; begin < tokens;) {
    const std::int64_t left = tokens - begin;
    const std::int64_t rows = left >= kRows ? std::min(left / kRows * kRows, kMostRows)
                              : left >= 32  ? 32
                              : left >= 16  ? 16
                                            : left;
    multiply_block(ctx, x.slice(0, begin, begin + rows), out.slice(0, begin, begin + rows));
    begin += rows;
  }
}

std::unique_ptr<const Call> OneDnnProduct::make_call(const CallShape& call_shape) const {
  const Operands o = operands(call_shape.tokens, weight_desc_, compute_dtype_);
  const auto descriptor = make_descriptor(o);
  FOVEA_CHECK(descriptor.has_value(), unsupported, "oneDNN has no matmul for {} rows of [{}, {}]",
              call_shape.tokens, shape().depth, shape().columns);
  return std::make_unique<const Call>(Call{call_shape, o.x, o.out, dnnl::matmul(*descriptor)});
}

void OneDnnProduct::multiply_block(const ExecutionContext& ctx, const TensorView& x,
                                   const TensorView& out) const {
  const TeamSize team(ctx.pool->num_threads());
  const CallShape call_shape{x.shape[0], ctx.pool->num_threads()};
  std::unique_ptr<const Call> made;
  const Call* call = calls_.find(call_shape);
  if (call == nullptr) {
    made = make_call(call_shape);
    call = made.get();
    calls_.keep(made);
  }
  thread_local dnnl::stream stream(engine());
  const dnnl::memory x_memory(call->x, engine(), x.data);
  const dnnl::memory weight_memory(weight_desc_, engine(), packed_.view().data);
  const dnnl::memory out_memory(call->out, engine(), out.data);
  std::unordered_map<int, dnnl::memory> arguments = {
      {DNNL_ARG_SRC, x_memory}, {DNNL_ARG_WEIGHTS, weight_memory}, {DNNL_ARG_DST, out_memory}};
  if (shape().has_bias) {
    const MemoryDesc desc(Dims{1, shape().columns}, dnnl::memory::data_type::f32, Tag::ab);
    arguments.emplace(DNNL_ARG_BIAS, dnnl::memory(desc, engine(), bias_.view().data));
  }
  call->primitive.execute(stream, arguments);
  stream.wait();
}

}  // namespace

std::unique_ptr<DenseProduct> make_onednn_product(const ProductShape& shape) {
  return std::make_unique<OneDnnProduct>(shape);
}

std::unique_ptr<DenseProduct> make_onednn_product_where_fastest(const ProductShape& shape) {
  auto product = std::make_unique<OneDnnProduct>(shape);
  if (!product->is_fastest()) return nullptr;
  return product;
}

}  // namespace fovea
