#include "model/layer_tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fovea {

namespace {

bool is_aligned(const TensorView& view) {
  const auto bytes = static_cast<std::uintptr_t>(bytes_of(view.dtype, 1));
  return reinterpret_cast<std::uintptr_t>(view.data) % bytes == 0;
}

/// The same bytes at an address that loads may use: a header may have any length.
Tensor aligned_copy(const TensorView& view) {
  Tensor copy =
      Tensor::empty(view.dtype, std::span(view.shape.data(), static_cast<std::size_t>(view.ndim)));
  std::memcpy(copy.view().data, view.data, static_cast<std::size_t>(copy.nbytes()));
  return copy;
}

Tensor converted(const TensorView& src, DType dtype, ThreadPool& pool) {
  Tensor result =
      Tensor::empty(dtype, std::span(src.shape.data(), static_cast<std::size_t>(src.ndim)));
  const TensorView dst = result.view();
  const std::int64_t rows = src.shape[0];
  const std::int64_t tasks = std::min<std::int64_t>(pool.num_threads(), rows);
  pool.run(tasks, [&](std::int64_t task) {
    const std::int64_t begin = rows * task / tasks;
    const std::int64_t end = rows * (task + 1) / tasks;
    copy(src.slice(0, begin, end), dst.slice(0, begin, end));
  });
  return result;
}

/// w from w - 1, with a single rounding.
Tensor plus_one(const TensorView& stored, DType dtype) {
  const std::int64_t size = stored.shape[0];
  Tensor weight = Tensor::empty(DType::f32, {size});
  copy(stored, weight.view());
  for (std::int64_t i = 0; i < size; ++i) weight.ptr<float>()[i] += 1.f;
  if (dtype == DType::f32) return weight;
  Tensor rounded = Tensor::empty(dtype, {size});
  copy(weight.view(), rounded.view());
  return rounded;
}

/// Whether `view` is one of the norm weights of a layer that may store them as w - 1.
bool is_norm(const LayerTensors& t, const TensorView& view) {
  return &view == &t.input_layernorm || &view == &t.post_attention_layernorm ||
         &view == &t.gqa.q_norm || &view == &t.gqa.k_norm;
}

}  // namespace

LayerMemory convert_layer(const LayerTensors& layer, DType dtype, NormWeights norms,
                          ThreadPool& pool) {
  LayerMemory result;
  result.tensors = layer;
  for_each_tensor(result.tensors, [&](TensorView& view) {
    Tensor owned;
    auto own = [&](Tensor tensor) {
      owned = std::move(tensor);
      view = owned.view();
    };
    if (!is_aligned(view)) own(aligned_copy(view));
    if (norms == NormWeights::plus_one && is_norm(result.tensors, view)) {
      own(plus_one(view, dtype));
    } else if (view.dtype != dtype && view.dtype != DType::f8e4m3fn) {
      own(converted(view, dtype, pool));
    }
    if (owned) result.memory.push_back(std::move(owned));
  });
  for_each_scale(result.tensors, [&](TensorView& view) {
    if (is_aligned(view)) return;
    result.memory.push_back(aligned_copy(view));
    view = result.memory.back();
  });
  return result;
}

}  // namespace fovea
