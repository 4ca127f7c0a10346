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

void convert(const TensorView& src, const TensorView& dst, ThreadPool& pool) {
  const std::int64_t rows = src.shape[0];
  const std::int64_t tasks = std::min<std::int64_t>(pool.num_threads(), rows);
  pool.run(tasks, [&](std::int64_t task) {
    const std::int64_t begin = rows * task / tasks;
    const std::int64_t end = rows * (task + 1) / tasks;
    copy(src.slice(0, begin, end), dst.slice(0, begin, end));
  });
}

}  // namespace

LayerMemory convert_layer(const LayerTensors& layer, DType dtype, ThreadPool& pool) {
  LayerMemory result;
  result.tensors = layer;
  for_each_tensor(result.tensors, [&](TensorView& view) {
    Tensor aligned;
    if (!is_aligned(view)) {
      aligned = aligned_copy(view);
      view = aligned.view();
    }
    if (view.dtype != dtype) {
      Tensor converted =
          Tensor::empty(dtype, std::span(view.shape.data(), static_cast<std::size_t>(view.ndim)));
      convert(view, converted.view(), pool);
      view = converted.view();
      result.memory.push_back(std::move(converted));
    } else if (aligned) {
      result.memory.push_back(std::move(aligned));
    }
  });
  return result;
}

}  // namespace fovea
