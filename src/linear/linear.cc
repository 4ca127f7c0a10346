#include "fovea/linear.h"

#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/kernel_time.h"
#include "linear/product.h"

namespace fovea {
namespace {

/// `asked`, or what FOVEA_LINEAR says where nothing was asked for.
LinearBackend resolve(LinearBackend asked) {
  const char* forced = std::getenv("FOVEA_LINEAR");
  if (asked != LinearBackend::automatic || forced == nullptr) return asked;
  const std::string_view name = forced;
  if (name == "onednn") return LinearBackend::onednn;
  if (name == "plain") return LinearBackend::plain;
  FOVEA_CHECK(name == "auto" || name.empty(), invalid_argument,
              "FOVEA_LINEAR is '{}', but must be onednn, plain or auto", name);
  return LinearBackend::automatic;
}

std::unique_ptr<DenseProduct> make_product(LinearBackend asked, const ProductShape& shape,
                                           const MemorySource& memory) {
  if (memory.device.type == Device::Type::cuda) {
    FOVEA_CHECK(asked == LinearBackend::automatic, invalid_argument,
                "linear backend is {}, but must be automatic for weights on {}",
                asked == LinearBackend::plain ? "plain" : "onednn", to_string(memory.device));
    return make_cublaslt_product(shape, memory);
  }
  const LinearBackend backend = resolve(asked);
  if (backend == LinearBackend::plain) return make_plain_product(shape);
  if (backend == LinearBackend::automatic) {
    auto product = make_onednn_product_where_fastest(shape);
    return product ? std::move(product) : make_plain_product(shape);
  }
  auto product = make_onednn_product(shape);
  FOVEA_CHECK(product != nullptr, unsupported,
              "linear backend is onednn, but this library was built without oneDNN "
              "(FOVEA_ONEDNN=OFF); plain is there");
  return product;
}

std::unique_ptr<QuantizedProduct> make_product(const ProductShape& shape,
                                               const WeightGroups& groups,
                                               const MemorySource& memory) {
  return memory.device.type == Device::Type::cuda
             ? make_cublaslt_quantized_product(shape, groups, memory)
             : make_quantized_product(shape, groups);
}

/// Weights and rows are where ctx computes. Host memory that a GPU addresses is the matter of its
/// product.
void check_places(const ExecutionContext& ctx, const Product& product, const TensorView& x,
                  const TensorView& out) {
  const Device device = product.device();
  FOVEA_CHECK(ctx.memory.device == device, invalid_argument,
              "weights are on {}, but ctx computes on {}: make them with its memory",
              to_string(device), to_string(ctx.memory.device));
  for (const auto& [name, view] : {std::pair{"x", &x}, std::pair{"out", &out}}) {
    FOVEA_CHECK(view->device == device || view->device == Device{}, invalid_argument,
                "{} is on {}, but must be on {}, as weights are", name, to_string(view->device),
                to_string(device));
  }
}

void check_compute_dtype(const char* name, const TensorView& view) {
  FOVEA_CHECK(is_compute_dtype(view.dtype), invalid_argument,
              "{} is {}, but must be f32, f16 or bf16", name, to_string(view));
}

/// An operand with unit innermost stride and the given trailing extents; the first is free.
void check_operand(const char* name, const TensorView& view, DType dtype,
                   std::initializer_list<std::int64_t> trailing) {
  const int ndim = static_cast<int>(trailing.size()) + 1;
  bool fits = view.ndim == ndim && view.dtype == dtype;
  std::size_t d = 1;
  for (std::int64_t extent : trailing) fits = fits && view.shape[d++] == extent;
  if (fits) {
    const auto last = static_cast<std::size_t>(ndim - 1);
    fits = view.strides[last] == 1 || view.shape[last] == 1;
  }
  if (fits && (view.data != nullptr || view.shape[0] == 0)) return;
  std::string wanted;
  for (std::int64_t extent : trailing) wanted += ", " + std::to_string(extent);
  fail(ErrorCode::invalid_argument, "{} is {}, but must be {}[T{}] with unit innermost stride",
       name, to_string(view), name_of(dtype), wanted);
}

void check_tokens(const TensorView& x, const TensorView& out) {
  FOVEA_CHECK(x.shape[0] == out.shape[0], invalid_argument,
              "out is {}, but must have as many rows as x, {}", to_string(out), to_string(x));
}

struct DenseOrQuantized {
  std::unique_ptr<DenseProduct> dense;
  std::unique_ptr<QuantizedProduct> quantized;  ///< One of the two is there.
  WeightGroups groups;

  const Product& product() const {
    return dense ? static_cast<const Product&>(*dense) : static_cast<const Product&>(*quantized);
  }
};

}  // namespace

// ---------------------------------------------------------------- Linear

struct Linear::Impl : DenseOrQuantized {};

namespace {

void check_weight(const TensorView& weight, const TensorView& bias) {
  FOVEA_CHECK(weight && weight.ndim == 2 && weight.shape[0] > 0 && weight.shape[1] > 0,
              invalid_argument, "weight is {}, but must be [out_features, in_features]",
              to_string(weight));
  check_compute_dtype("weight", weight);
  FOVEA_CHECK(
      !bias || (bias.ndim == 1 && bias.shape[0] == weight.shape[0] && bias.dtype == weight.dtype),
      invalid_argument, "bias is {}, but must be {}[{}], like weight {}", to_string(bias),
      name_of(weight.dtype), weight.shape[0], to_string(weight));
}

void check_bias(const QuantizedWeight& weight, const TensorView& bias, DType dtype) {
  FOVEA_CHECK(is_compute_dtype(dtype), invalid_argument,
              "dtype is {}, but must be f32, f16 or bf16", name_of(dtype));
  FOVEA_CHECK(
      !bias || (bias.ndim == 1 && bias.shape[0] == weight.codes.shape[0] && bias.dtype == dtype),
      invalid_argument, "bias is {}, but must be {}[{}]", to_string(bias), name_of(dtype),
      weight.codes.shape[0]);
}

/// weight [out, in] as [1, in, out].
TensorView as_product_weight(const TensorView& weight) {
  return weight.split(0, 1, weight.shape[0]).transpose(1, 2);
}

}  // namespace

Linear::Linear(const TensorView& weight, const TensorView& bias, LinearBackend backend,
               const MemorySource& memory) {
  check_weight(weight, bias);
  impl_ = std::make_unique<Impl>();
  impl_->dense = make_product(backend, {.depth = weight.shape[1],
                                        .columns = weight.shape[0],
                                        .dtype = weight.dtype,
                                        .has_bias = static_cast<bool>(bias)},
                              memory);
  impl_->dense->load(as_product_weight(weight), bias);
}

Linear::Linear(const QuantizedWeight& weight, const TensorView& bias, DType dtype,
               const MemorySource& memory) {
  check_quantized_weight(weight);
  check_bias(weight, bias, dtype);
  impl_ = std::make_unique<Impl>();
  impl_->groups = weight.groups;
  impl_->quantized = make_product({.depth = fovea::in_features(weight),
                                   .columns = weight.codes.shape[0],
                                   .dtype = dtype,
                                   .has_bias = static_cast<bool>(bias),
                                   .is_mxfp4 = is_mxfp4(weight)},
                                  weight.groups, memory);
  impl_->quantized->load({&weight, 1}, bias);
}

Linear::Linear() = default;
Linear::~Linear() = default;
Linear::Linear(Linear&&) noexcept = default;
Linear& Linear::operator=(Linear&&) noexcept = default;

std::int64_t Linear::in_features() const { return impl_->product().shape().depth; }
std::int64_t Linear::out_features() const { return impl_->product().shape().columns; }
DType Linear::dtype() const { return impl_->product().shape().dtype; }
std::int64_t Linear::weight_bytes() const { return impl_->product().weight_bytes(); }
std::string_view Linear::backend_name() const { return impl_->product().name(); }
std::optional<WeightGroups> Linear::groups() const {
  return impl_->quantized ? std::optional(impl_->groups) : std::nullopt;
}

void Linear::operator()(const ExecutionContext& ctx, const TensorView& x,
                        const TensorView& out) const {
  check_operand("x", x, dtype(), {in_features()});
  check_operand("out", out, dtype(), {out_features()});
  check_tokens(x, out);
  check_places(ctx, impl_->product(), x, out);
  if (x.shape[0] == 0) return;
  const KernelTimer timer;
  impl_->product().run(ctx, x.split(1, 1, in_features()), out.split(1, 1, out_features()));
}

std::int64_t Linear::workspace_bytes(std::int64_t tokens) const {
  return impl_->product().workspace_bytes(tokens);
}

void Linear::reload(const TensorView& weight, const TensorView& bias) {
  FOVEA_CHECK(impl_->dense != nullptr, invalid_argument,
              "reload with weight {}, but was made with a quantised one", to_string(weight));
  check_weight(weight, bias);
  const ProductShape& shape = impl_->product().shape();
  FOVEA_CHECK(weight.dtype == shape.dtype && weight.shape[0] == shape.columns &&
                  weight.shape[1] == shape.depth && static_cast<bool>(bias) == shape.has_bias,
              invalid_argument,
              "reload with weight {} {} bias, but was made with {}[{}, {}] {} bias",
              to_string(weight), bias ? "and a" : "without", name_of(shape.dtype), shape.columns,
              shape.depth, shape.has_bias ? "and a" : "without");
  impl_->dense->load(as_product_weight(weight), bias);
}

void Linear::reload(const QuantizedWeight& weight, const TensorView& bias) {
  FOVEA_CHECK(impl_->quantized != nullptr, invalid_argument,
              "reload with a quantised weight, but was made with one of {}", name_of(dtype()));
  check_quantized_weight(weight);
  check_bias(weight, bias, dtype());
  const ProductShape& shape = impl_->product().shape();
  FOVEA_CHECK(weight.codes.shape[0] == shape.columns &&
                  fovea::in_features(weight) == shape.depth &&
                  is_mxfp4(weight) == shape.is_mxfp4 && weight.groups == impl_->groups &&
                  static_cast<bool>(bias) == shape.has_bias,
              invalid_argument,
              "reload with codes {} in groups of [{}, {}] {} bias, but was made with [{}, {}] in "
              "groups of [{}, {}] {} bias",
              to_string(weight.codes), weight.groups.out, weight.groups.in,
              bias ? "and a" : "without", shape.columns, shape.depth, impl_->groups.out,
              impl_->groups.in, shape.has_bias ? "and a" : "without");
  impl_->quantized->load({&weight, 1}, bias);
}

// ---------------------------------------------------------------- BatchedLinear

struct BatchedLinear::Impl : DenseOrQuantized {};

namespace {

void check_batched_weight(const TensorView& weight) {
  FOVEA_CHECK(weight && weight.ndim == 3 && weight.shape[0] > 0 && weight.shape[1] > 0 &&
                  weight.shape[2] > 0,
              invalid_argument, "weight is {}, but must be [heads, in, out]", to_string(weight));
  check_compute_dtype("weight", weight);
}

/// Heads with codes of one shape in groups of one kind, all of them whole.
void check_heads(std::span<const QuantizedWeight> heads) {
  FOVEA_CHECK(!heads.empty(), invalid_argument, "heads are none, but must be at least one");
  const TensorView& first = heads[0].codes;
  const WeightGroups& groups = heads[0].groups;
  for (const QuantizedWeight& head : heads) {
    check_quantized_weight(head);
    FOVEA_CHECK(
        head.codes.shape == first.shape && head.codes.dtype == first.dtype &&
            head.groups == groups,
        invalid_argument,
        "codes of a head are {} in groups of [{}, {}], but must be like those of the first, "
        "{} in groups of [{}, {}]",
        to_string(head.codes), head.groups.out, head.groups.in, to_string(first), groups.out,
        groups.in);
  }
  const bool whole = (groups.out == 0 || first.shape[0] % groups.out == 0) &&
                     (groups.in == 0 || in_features(heads[0]) % groups.in == 0);
  FOVEA_CHECK(whole, invalid_argument,
              "codes of a head are {}, but must be whole groups of [{}, {}]", to_string(first),
              groups.out, groups.in);
}

}  // namespace

BatchedLinear::BatchedLinear(std::span<const QuantizedWeight> heads, DType dtype,
                             const MemorySource& memory) {
  check_heads(heads);
  FOVEA_CHECK(is_compute_dtype(dtype), invalid_argument,
              "dtype is {}, but must be f32, f16 or bf16", name_of(dtype));
  impl_ = std::make_unique<Impl>();
  impl_->groups = heads[0].groups;
  impl_->quantized = make_product({.heads = static_cast<std::int64_t>(heads.size()),
                                   .depth = in_features(heads[0]),
                                   .columns = heads[0].codes.shape[0],
                                   .dtype = dtype,
                                   .quantizes_x = !is_mxfp4(heads[0]),
                                   .is_mxfp4 = is_mxfp4(heads[0])},
                                  impl_->groups, memory);
  impl_->quantized->load(heads, {});
}

BatchedLinear::BatchedLinear(const TensorView& weight, LinearBackend backend,
                             const MemorySource& memory) {
  check_batched_weight(weight);
  impl_ = std::make_unique<Impl>();
  impl_->dense = make_product(backend, {.heads = weight.shape[0],
                                        .depth = weight.shape[1],
                                        .columns = weight.shape[2],
                                        .dtype = weight.dtype},
                              memory);
  impl_->dense->load(weight, {});
}

BatchedLinear::BatchedLinear() = default;
BatchedLinear::~BatchedLinear() = default;
BatchedLinear::BatchedLinear(BatchedLinear&&) noexcept = default;
BatchedLinear& BatchedLinear::operator=(BatchedLinear&&) noexcept = default;

std::int64_t BatchedLinear::weight_bytes() const { return impl_->product().weight_bytes(); }
std::string_view BatchedLinear::backend_name() const { return impl_->product().name(); }

void BatchedLinear::operator()(const ExecutionContext& ctx, const TensorView& x,
                               const TensorView& out) const {
  const ProductShape& shape = impl_->product().shape();
  check_operand("x", x, shape.dtype, {shape.heads, shape.depth});
  check_operand("out", out, shape.dtype, {shape.heads, shape.columns});
  check_tokens(x, out);
  check_places(ctx, impl_->product(), x, out);
  if (x.shape[0] == 0) return;
  const KernelTimer timer;
  impl_->product().run(ctx, x, out);
}

std::int64_t BatchedLinear::workspace_bytes(std::int64_t tokens) const {
  return impl_->product().workspace_bytes(tokens);
}

void BatchedLinear::reload(std::span<const QuantizedWeight> heads) {
  FOVEA_CHECK(impl_->quantized != nullptr, invalid_argument,
              "reload with quantised heads, but was made with a weight of {}",
              name_of(impl_->product().shape().dtype));
  check_heads(heads);
  const ProductShape& shape = impl_->product().shape();
  FOVEA_CHECK(static_cast<std::int64_t>(heads.size()) == shape.heads &&
                  heads[0].codes.shape[0] == shape.columns &&
                  in_features(heads[0]) == shape.depth &&
                  is_mxfp4(heads[0]) == shape.is_mxfp4 && heads[0].groups == impl_->groups,
              invalid_argument,
              "reload with {} heads {} in groups of [{}, {}], but was made with {} of [{}, {}] in "
              "groups of [{}, {}]",
              heads.size(), to_string(heads[0].codes), heads[0].groups.out, heads[0].groups.in,
              shape.heads, shape.columns, shape.depth, impl_->groups.out, impl_->groups.in);
  impl_->quantized->load(heads, {});
}

void BatchedLinear::reload(const TensorView& weight) {
  FOVEA_CHECK(impl_->dense != nullptr, invalid_argument,
              "reload with weight {}, but was made with quantised heads", to_string(weight));
  check_batched_weight(weight);
  const ProductShape& shape = impl_->product().shape();
  FOVEA_CHECK(weight.dtype == shape.dtype && weight.shape[0] == shape.heads &&
                  weight.shape[1] == shape.depth && weight.shape[2] == shape.columns,
              invalid_argument, "reload with weight {}, but was made with {}[{}, {}, {}]",
              to_string(weight), name_of(shape.dtype), shape.heads, shape.depth, shape.columns);
  impl_->dense->load(weight, {});
}

}  // namespace fovea
