// Strided, converting copies.
#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/float_bits.h"
#include "fovea/tensor.h"

namespace fovea {
namespace {

/// One innermost run: n elements, strides in elements.
struct Run {
  const std::byte* src;
  std::byte* dst;
  std::int64_t n;
  std::int64_t src_stride;
  std::int64_t dst_stride;
};
using CopyRun = void (*)(const Run&);

template <class Src, class Dst>
void convert_run(const Run& run) {
  const auto* src = reinterpret_cast<const Src*>(run.src);
  auto* dst = reinterpret_cast<Dst*>(run.dst);
  for (std::int64_t i = 0; i < run.n; ++i) {
    dst[i * run.dst_stride] = narrow<Dst>(widen(src[i * run.src_stride]));
  }
}

template <std::size_t bytes>
void move_run(const Run& run) {
  constexpr auto kBytes = static_cast<std::int64_t>(bytes);
  if (run.src_stride == 1 && run.dst_stride == 1) {
    std::memcpy(run.dst, run.src, static_cast<std::size_t>(run.n) * bytes);
    return;
  }
  for (std::int64_t i = 0; i < run.n; ++i) {
    std::memcpy(run.dst + i * run.dst_stride * kBytes, run.src + i * run.src_stride * kBytes,
                bytes);
  }
}

/// Packed nibbles: unit strides, an even count.
void move_nibbles(const Run& run) {
  std::memcpy(run.dst, run.src, static_cast<std::size_t>(run.n / 2));
}

template <class Src>
CopyRun converter_from(DType dst) {
  switch (dst) {
    case DType::f32:
      return convert_run<Src, float>;
    case DType::f16:
      return convert_run<Src, Float16>;
    default:
      return convert_run<Src, BFloat16>;
  }
}

CopyRun choose_run(DType src, DType dst) {
  if (src == dst) {
    switch (bits_of(src)) {
      case 4:
        return move_nibbles;
      case 8:
        return move_run<1>;
      case 16:
        return move_run<2>;
      case 32:
        return move_run<4>;
      default:
        return move_run<8>;
    }
  }
  FOVEA_CHECK(is_compute_dtype(src) && is_compute_dtype(dst), unsupported,
              "copy from {} to {}: only f32, f16 and bf16 are converted", name_of(src),
              name_of(dst));
  switch (src) {
    case DType::f32:
      return converter_from<float>(dst);
    case DType::f16:
      return converter_from<Float16>(dst);
    default:
      return converter_from<BFloat16>(dst);
  }
}

std::int64_t byte_offset(DType dtype, std::int64_t elements) {
  const int bits = bits_of(dtype);
  return bits >= 8 ? elements * (bits / 8) : elements / 2;
}

}  // namespace

void copy(const TensorView& src, const TensorView& dst) {
  FOVEA_CHECK(src && dst, invalid_argument, "copy needs both views, but src is {} and dst is {}",
              to_string(src), to_string(dst));
  const auto* src_shape = src.shape.data();
  FOVEA_CHECK(
      std::equal(src_shape, src_shape + src.ndim, dst.shape.data(), dst.shape.data() + dst.ndim),
      invalid_argument, "copy needs equal shapes, but src is {} and dst is {}", to_string(src),
      to_string(dst));
  FOVEA_CHECK(src.device == Device{} && dst.device == Device{}, unsupported,
              "copy is for views of host memory");
  const CopyRun copy_run = choose_run(src.dtype, dst.dtype);
  if (src.numel() == 0) return;

  const int outer = src.ndim > 0 ? src.ndim - 1 : 0;
  const auto last = static_cast<std::size_t>(outer);
  Run run{};
  run.n = src.ndim > 0 ? src.shape[last] : 1;
  run.src_stride = run.n > 1 ? src.strides[last] : 1;
  run.dst_stride = run.n > 1 ? dst.strides[last] : 1;
  FOVEA_CHECK(
      bits_of(src.dtype) >= 8 || (run.n % 2 == 0 && run.src_stride == 1 && run.dst_stride == 1),
      invalid_argument,
      "copy of packed {} needs an even innermost extent of unit stride, but src is {} and "
      "dst is {}",
      name_of(src.dtype), to_string(src), to_string(dst));

  std::array<std::int64_t, kMaxRank> index{};
  for (;;) {
    std::int64_t src_offset = 0;
    std::int64_t dst_offset = 0;
    for (std::size_t d = 0; d < last; ++d) {
      src_offset += index[d] * src.strides[d];
      dst_offset += index[d] * dst.strides[d];
    }
    run.src = static_cast<const std::byte*>(src.data) + byte_offset(src.dtype, src_offset);
    run.dst = static_cast<std::byte*>(dst.data) + byte_offset(dst.dtype, dst_offset);
    copy_run(run);

    int d = outer - 1;
    while (d >= 0 &&
           ++index[static_cast<std::size_t>(d)] == src.shape[static_cast<std::size_t>(d)]) {
      index[static_cast<std::size_t>(d--)] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace fovea
