// Tensor views (one to one with DLPack) and owning tensors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "fovea/dtype.h"
#include "fovea/memory.h"

namespace fovea {

inline constexpr int kMaxRank = 6;

/// A non-owning strided array. `data` points at element [0, ..., 0]; strides count elements and may
/// be anything, zero and negative included. A default-constructed view is absent: `!view`.
/// Sub-byte dtypes need an even innermost extent and unit innermost stride.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int ndim = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};
  Device device{};

  /// A row-major view of `data`.
  static TensorView contiguous(void* data, DType dtype, std::span<const std::int64_t> shape);
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape);
  /// Same, dtype from the element type. Takes const elements: who only reads says so in the op.
  template <class T>
  static TensorView of(const T* data, std::initializer_list<std::int64_t> shape) {
    return contiguous(const_cast<T*>(data), dtype_of<T>, shape);
  }

  explicit operator bool() const { return data != nullptr; }
  /// 0 for an absent view, 1 for a scalar.
  std::int64_t numel() const;
  /// True when the elements lie row-major without gaps; extents of 1 have no say.
  bool is_contiguous() const;

  /// Elements [begin, end) of dimension `dim`. Throws Error(invalid_argument) out of range.
  TensorView slice(int dim, std::int64_t begin, std::int64_t end) const;
  /// Index `index` of dimension `dim`, which goes away.
  TensorView select(int dim, std::int64_t index) const;
  /// Splits dimension `dim` into [outer, inner]; throws unless outer * inner is its extent.
  TensorView split(int dim, std::int64_t outer, std::int64_t inner) const;
  /// Fuses dimensions `dim` and `dim + 1`; throws unless their strides allow it.
  TensorView fuse(int dim) const;
  TensorView transpose(int dim_a, int dim_b) const;

  /// Address of an element; whole-byte dtypes only. 64-bit offsets.
  template <class T>
  T* ptr(std::initializer_list<std::int64_t> index = {}) const {
    std::int64_t offset = 0;
    int d = 0;
    for (std::int64_t i : index) offset += i * strides[static_cast<std::size_t>(d++)];
    return static_cast<T*>(data) + offset;
  }
};

/// "bf16[3, 16, 576] strides [9216, 576, 1]", for error texts.
std::string to_string(const TensorView& view);

/// Owning, row-major, 64-byte aligned memory. Movable, not copyable.
class Tensor {
 public:
  Tensor() = default;
  /// Uninitialised. Throws Error(invalid_argument) on a negative extent or overflow.
  static Tensor empty(DType dtype, std::span<const std::int64_t> shape,
                      const MemorySource& memory = {});
  static Tensor empty(DType dtype, std::initializer_list<std::int64_t> shape,
                      const MemorySource& memory = {});
  static Tensor zeros(DType dtype, std::span<const std::int64_t> shape);
  static Tensor zeros(DType dtype, std::initializer_list<std::int64_t> shape);
  /// The elements of `view` in host memory, any strides; absent of an absent view.
  static Tensor copy_of(const TensorView& view, const MemorySource& memory = {});
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(Tensor&& other) noexcept;

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }
  explicit operator bool() const { return static_cast<bool>(view_); }

  template <class T>
  T* ptr(std::initializer_list<std::int64_t> index = {}) const {
    return view_.ptr<T>(index);
  }
  std::int64_t nbytes() const { return bytes_of(view_.dtype, view_.numel()); }
  /// As copy(src, view()) does, wherever this tensor is; `src` is in host memory. Not in a step:
  /// allocates where the two differ in more than the device.
  void assign(const TensorView& src) const;

 private:
  struct Free {
    MemorySource source;
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  TensorView view_;
};

/// dst = src, element by element: between f32, f16 and bf16 (round to nearest even), or between
/// equal dtypes. Shapes must be equal. Strided on both sides; the two must not overlap.
void copy(const TensorView& src, const TensorView& dst);

}  // namespace fovea
