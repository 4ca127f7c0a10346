#include "model/seeded_tensors.h"

#include <utility>

namespace fovea {

std::uint64_t stream_key(Domain domain, std::uint64_t seed, std::uint64_t major,
                         std::uint64_t minor) {
  std::uint64_t key = 0;
  for (const std::uint64_t word : {static_cast<std::uint64_t>(domain), seed, major, minor}) {
    key = mix((key ^ word) + kStep);
  }
  return key;
}

void random_row(std::uint64_t key, std::int64_t row, std::int64_t columns, float scale,
                float* out) {
  const auto first = static_cast<std::uint64_t>(row * columns);
  for (std::int64_t c = 0; c < columns; ++c) {
    out[c] = centred_sum(key, first + static_cast<std::uint64_t>(c)) * scale;
  }
}

void norm_row(std::uint64_t key, std::int64_t size, float centre, float* out) {
  const float unit = scale_of(1);
  for (std::int64_t c = 0; c < size; ++c) {
    const float weight = 1.f + centred_sum(key, static_cast<std::uint64_t>(c)) * unit * kNormSpread;
    out[c] = weight * centre;
  }
}

TensorView SeededTensors::allocate(std::initializer_list<std::int64_t> shape) {
  memory_.push_back(Tensor::empty(dtype_, shape));
  return memory_.back().view();
}

void SeededTensors::store(const float* values, std::int64_t count, const TensorView& dst,
                          std::int64_t offset) {
  const TensorView src = TensorView::of(values, {count});
  TensorView row = TensorView::contiguous(dst.data, dst.dtype, {dst.numel()});
  copy(src, row.slice(0, offset, offset + count));
}

TensorView SeededTensors::random(TensorId id, std::initializer_list<std::int64_t> shape,
                                 double std) {
  const std::int64_t columns = *(shape.end() - 1);
  return fill(shape, [=, k = key(id), scale = scale_of(std)](std::int64_t r, float* out) {
    random_row(k, r, columns, scale, out);
  });
}

TensorView SeededTensors::norm_weight(TensorId id, std::int64_t size, float centre) {
  return fill({size},
              [=, k = key(id)](std::int64_t, float* out) { norm_row(k, size, centre, out); });
}

}  // namespace fovea
