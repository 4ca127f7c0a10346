#include "fovea/tensor.h"

#include <cstring>
#include <utility>

#include "core/aligned_memory.h"
#include "core/check.h"

namespace fovea {
namespace {

std::size_t at(int dim) { return static_cast<std::size_t>(dim); }

void check_dim(const TensorView& view, int dim) {
  FOVEA_CHECK(dim >= 0 && dim < view.ndim, invalid_argument,
              "dim is {}, but must be in [0, {}) for {}", dim, view.ndim, to_string(view));
}

/// Moves `data` by `elements`, which must be whole bytes.
void advance(TensorView& view, std::int64_t elements) {
  const int bits = bits_of(view.dtype);
  FOVEA_CHECK(bits >= 8 || elements % 2 == 0, invalid_argument,
              "an offset of {} elements is no whole byte of {}", elements, to_string(view));
  const std::int64_t bytes = bits >= 8 ? elements * (bits / 8) : elements / 2;
  // Of an absent or empty view nothing is addressed, and null + 0 is all that may be formed.
  if (bytes != 0) view.data = static_cast<std::byte*>(view.data) + bytes;
}

}  // namespace

TensorView TensorView::contiguous(void* data, DType dtype, std::span<const std::int64_t> shape) {
  FOVEA_CHECK(shape.size() <= kMaxRank, invalid_argument,
              "shape has {} dimensions, but at most {} are possible", shape.size(), kMaxRank);
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int d = view.ndim - 1; d >= 0; --d) {
    const std::int64_t extent = shape[at(d)];
    FOVEA_CHECK(extent >= 0, invalid_argument, "shape[{}] is {}, but must not be negative", d,
                extent);
    view.shape[at(d)] = extent;
    view.strides[at(d)] = stride;
    FOVEA_CHECK(!__builtin_mul_overflow(stride, extent > 0 ? extent : 1, &stride), invalid_argument,
                "shape[{}] is {}: the elements do not fit 64 bits", d, extent);
  }
  std::int64_t bits = 0;
  FOVEA_CHECK(!__builtin_mul_overflow(stride, bits_of(dtype), &bits), invalid_argument,
              "shape: {} elements of {} do not fit 64 bits", stride, name_of(dtype));
  const std::int64_t innermost = view.ndim > 0 ? shape[at(view.ndim - 1)] : 1;
  FOVEA_CHECK(bits_of(dtype) >= 8 || innermost % 2 == 0, invalid_argument,
              "the innermost extent is {}, but must be even for {}, which packs two per byte",
              innermost, name_of(dtype));
  return view;
}

TensorView TensorView::contiguous(void* data, DType dtype,
                                  std::initializer_list<std::int64_t> shape) {
  return contiguous(data, dtype, std::span(shape.begin(), shape.size()));
}

std::int64_t TensorView::numel() const {
  if (data == nullptr) return 0;
  std::int64_t count = 1;
  for (int d = 0; d < ndim; ++d) count *= shape[at(d)];
  return count;
}

bool TensorView::is_contiguous() const {
  if (numel() == 0) return true;
  std::int64_t expected = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    if (shape[at(d)] != 1 && strides[at(d)] != expected) return false;
    expected *= shape[at(d)];
  }
  return true;
}

TensorView TensorView::slice(int dim, std::int64_t begin, std::int64_t end) const {
  check_dim(*this, dim);
  FOVEA_CHECK(0 <= begin && begin <= end && end <= shape[at(dim)], invalid_argument,
              "the slice is [{}, {}), but must lie in [0, {}) of dimension {} of {}", begin, end,
              shape[at(dim)], dim, to_string(*this));
  FOVEA_CHECK(bits_of(dtype) >= 8 || dim + 1 < ndim || (end - begin) % 2 == 0, invalid_argument,
              "the slice [{}, {}) has an odd extent, but {} packs two per byte", begin, end,
              name_of(dtype));
  TensorView view = *this;
  view.shape[at(dim)] = end - begin;
  // An empty slice addresses nothing; its start may lie past the end.
  if (begin < end) advance(view, begin * strides[at(dim)]);
  return view;
}

TensorView TensorView::select(int dim, std::int64_t index) const {
  check_dim(*this, dim);
  FOVEA_CHECK(0 <= index && index < shape[at(dim)], invalid_argument,
              "index is {}, but must be in [0, {}) for dimension {} of {}", index, shape[at(dim)],
              dim, to_string(*this));
  FOVEA_CHECK(bits_of(dtype) >= 8 || dim + 1 < ndim, invalid_argument,
              "single elements of {} have no address: it packs two per byte", name_of(dtype));
  TensorView view = *this;
  advance(view, index * strides[at(dim)]);
  for (int d = dim; d + 1 < ndim; ++d) {
    view.shape[at(d)] = shape[at(d + 1)];
    view.strides[at(d)] = strides[at(d + 1)];
  }
  --view.ndim;
  view.shape[at(view.ndim)] = 0;
  view.strides[at(view.ndim)] = 0;
  return view;
}

TensorView TensorView::split(int dim, std::int64_t outer, std::int64_t inner) const {
  check_dim(*this, dim);
  FOVEA_CHECK(ndim < kMaxRank, invalid_argument, "{} has {} dimensions already, the most there are",
              to_string(*this), ndim);
  std::int64_t extent = 0;
  FOVEA_CHECK(outer >= 0 && inner >= 0 && !__builtin_mul_overflow(outer, inner, &extent) &&
                  extent == shape[at(dim)],
              invalid_argument,
              "the split is [{}, {}], but must multiply to {}, dimension {} of {}", outer, inner,
              shape[at(dim)], dim, to_string(*this));
  FOVEA_CHECK(bits_of(dtype) >= 8 || dim + 1 < ndim || inner % 2 == 0, invalid_argument,
              "the innermost extent is {}, but must be even for {}, which packs two per byte",
              inner, name_of(dtype));
  std::int64_t outer_stride = 0;
  FOVEA_CHECK(!__builtin_mul_overflow(inner, strides[at(dim)], &outer_stride), invalid_argument,
              "dimension {} of {} has a stride too long to split", dim, to_string(*this));
  TensorView view = *this;
  for (int d = ndim; d > dim + 1; --d) {
    view.shape[at(d)] = shape[at(d - 1)];
    view.strides[at(d)] = strides[at(d - 1)];
  }
  view.shape[at(dim)] = outer;
  view.strides[at(dim)] = outer_stride;
  view.shape[at(dim + 1)] = inner;
  view.strides[at(dim + 1)] = strides[at(dim)];
  ++view.ndim;
  return view;
}

TensorView TensorView::fuse(int dim) const {
  check_dim(*this, dim);
  check_dim(*this, dim + 1);
  const std::int64_t outer = shape[at(dim)];
  const std::int64_t inner = shape[at(dim + 1)];
  const std::int64_t outer_stride = strides[at(dim)];
  const std::int64_t inner_stride = strides[at(dim + 1)];
  std::int64_t step = 0;
  const bool adjacent = !__builtin_mul_overflow(inner, inner_stride, &step) && step == outer_stride;
  FOVEA_CHECK(adjacent || outer <= 1 || inner <= 1, invalid_argument,
              "dimensions {} and {} of {} do not follow each other in memory", dim, dim + 1,
              to_string(*this));
  std::int64_t extent = 0;
  FOVEA_CHECK(!__builtin_mul_overflow(outer, inner, &extent), invalid_argument,
              "dimensions {} and {} of {} have too many elements", dim, dim + 1, to_string(*this));
  TensorView view = *this;
  view.shape[at(dim)] = extent;
  view.strides[at(dim)] = inner == 1 ? outer_stride : inner_stride;
  for (int d = dim + 1; d + 1 < ndim; ++d) {
    view.shape[at(d)] = shape[at(d + 1)];
    view.strides[at(d)] = strides[at(d + 1)];
  }
  --view.ndim;
  view.shape[at(view.ndim)] = 0;
  view.strides[at(view.ndim)] = 0;
  return view;
}

TensorView TensorView::transpose(int dim_a, int dim_b) const {
  check_dim(*this, dim_a);
  check_dim(*this, dim_b);
  FOVEA_CHECK(bits_of(dtype) >= 8 || dim_a == dim_b || (dim_a + 1 < ndim && dim_b + 1 < ndim),
              invalid_argument, "the innermost dimension of {} must stay, as {} packs two per byte",
              to_string(*this), name_of(dtype));
  TensorView view = *this;
  std::swap(view.shape[at(dim_a)], view.shape[at(dim_b)]);
  std::swap(view.strides[at(dim_a)], view.strides[at(dim_b)]);
  return view;
}

std::string to_string(const TensorView& view) {
  const auto list = [&view](const std::array<std::int64_t, kMaxRank>& values) {
    std::string text = "[";
    for (int d = 0; d < view.ndim; ++d) {
      if (d > 0) text += ", ";
      text += std::to_string(values[at(d)]);
    }
    return text + "]";
  };
  if (!view && view.ndim == 0) return "absent";
  return std::string(name_of(view.dtype)) + list(view.shape) + " strides " + list(view.strides);
}

void Tensor::Free::operator()(std::byte* memory) const { release(source, memory); }

Tensor::Tensor(Tensor&& other) noexcept
    : memory_(std::move(other.memory_)), view_(std::exchange(other.view_, {})) {}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
  memory_ = std::move(other.memory_);
  view_ = std::exchange(other.view_, {});
  return *this;
}

Tensor Tensor::empty(DType dtype, std::span<const std::int64_t> shape,
                     const MemorySource& memory) {
  Tensor tensor;
  tensor.view_ = TensorView::contiguous(nullptr, dtype, shape);
  std::int64_t count = 1;
  for (std::int64_t extent : shape) count *= extent;
  tensor.memory_ = std::unique_ptr<std::byte, Free>(
      allocate(memory, bytes_of(dtype, count), "Tensor"), Free{memory});
  tensor.view_.data = tensor.memory_.get();
  tensor.view_.device = memory.device;
  return tensor;
}

Tensor Tensor::empty(DType dtype, std::initializer_list<std::int64_t> shape,
                     const MemorySource& memory) {
  return empty(dtype, std::span(shape.begin(), shape.size()), memory);
}

Tensor Tensor::zeros(DType dtype, std::span<const std::int64_t> shape) {
  Tensor tensor = empty(dtype, shape);
  std::memset(tensor.memory_.get(), 0, static_cast<std::size_t>(tensor.nbytes()));
  return tensor;
}

Tensor Tensor::zeros(DType dtype, std::initializer_list<std::int64_t> shape) {
  return zeros(dtype, std::span(shape.begin(), shape.size()));
}

Tensor Tensor::copy_of(const TensorView& view, const MemorySource& memory) {
  if (!view) return {};
  const auto ndim = static_cast<std::size_t>(view.ndim);
  Tensor result = empty(view.dtype, std::span(view.shape).first(ndim), memory);
  result.assign(view);
  return result;
}

void Tensor::assign(const TensorView& src) const {
  if (view_.device.type == Device::Type::cpu) return copy(src, view_);
  const bool equal = src.dtype == view_.dtype && src.ndim == view_.ndim &&
                     src.shape == view_.shape && src.is_contiguous();
  if (equal) return copy_bytes(memory_.get_deleter().source, view_.data, src.data, nbytes());
  const auto ndim = static_cast<std::size_t>(view_.ndim);
  const Tensor staged = empty(view_.dtype, std::span(view_.shape).first(ndim));
  copy(src, staged);
  copy_bytes(memory_.get_deleter().source, view_.data, staged.view().data, nbytes());
}

}  // namespace fovea
