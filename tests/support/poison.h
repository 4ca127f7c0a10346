// Test operands: seeded fills, reading any view as doubles, and poison for bytes nobody may use.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numbers>
#include <span>
#include <type_traits>
#include <vector>

#include "fovea/dtype.h"
#include "fovea/tensor.h"
#include "fovea/workspace.h"

namespace fovea::test {

/// Calls fn(index array, address of the element, row-major number) for each element of a view of a
/// whole-byte dtype.
template <class F>
void for_each_element(const TensorView& view, F&& fn) {
  const std::int64_t element_bytes = bits_of(view.dtype) / 8;
  std::array<std::int64_t, kMaxRank> index{};
  const std::int64_t count = view.numel();
  for (std::int64_t n = 0; n < count; ++n) {
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(view.ndim); ++d) {
      offset += index[d] * view.strides[d];
    }
    fn(index, static_cast<std::byte*>(view.data) + offset * element_bytes, n);
    for (int d = view.ndim - 1; d >= 0; --d) {
      const auto u = static_cast<std::size_t>(d);
      if (++index[u] < view.shape[u]) break;
      index[u] = 0;
    }
  }
}

namespace detail {

template <class T>
double load(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<double>(value);
  } else {
    return static_cast<double>(to_float(value));
  }
}

template <class T>
void store(std::byte* address, double x) {
  T value;
  if constexpr (std::is_integral_v<T>) {
    value = static_cast<T>(x);
  } else {
    value = from_float<T>(static_cast<float>(x));
  }
  std::memcpy(address, &value, sizeof(T));
}

}  // namespace detail

/// One element as double; f32, f16, bf16, 8-bit floats and integers.
inline double load_element(DType dtype, const std::byte* address) {
  switch (dtype) {
    case DType::f32:
      return detail::load<float>(address);
    case DType::f16:
      return detail::load<Float16>(address);
    case DType::bf16:
      return detail::load<BFloat16>(address);
    case DType::f8e4m3fn:
      return detail::load<Float8E4M3FN>(address);
    case DType::f8e5m2:
      return detail::load<Float8E5M2>(address);
    case DType::f8e8m0:
      return detail::load<Float8E8M0>(address);
    case DType::i8:
      return detail::load<std::int8_t>(address);
    case DType::u8:
      return detail::load<std::uint8_t>(address);
    case DType::i32:
      return detail::load<std::int32_t>(address);
    case DType::i64:
      return detail::load<std::int64_t>(address);
    default:
      ADD_FAILURE() << "load_element: packed dtype " << name_of(dtype);
      return 0;
  }
}

inline void store_element(DType dtype, std::byte* address, double x) {
  switch (dtype) {
    case DType::f32:
      return detail::store<float>(address, x);
    case DType::f16:
      return detail::store<Float16>(address, x);
    case DType::bf16:
      return detail::store<BFloat16>(address, x);
    case DType::i8:
      return detail::store<std::int8_t>(address, x);
    case DType::u8:
      return detail::store<std::uint8_t>(address, x);
    case DType::i32:
      return detail::store<std::int32_t>(address, x);
    case DType::i64:
      return detail::store<std::int64_t>(address, x);
    default:
      ADD_FAILURE() << "store_element: " << name_of(dtype) << " is not filled by tests";
  }
}

/// Every element in row-major order, whatever the strides.
inline std::vector<double> to_doubles(const TensorView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.numel()));
  for_each_element(view, [&](const auto&, const std::byte* address, std::int64_t n) {
    values[static_cast<std::size_t>(n)] = load_element(view.dtype, address);
  });
  return values;
}

/// Writes values in row-major order, rounded to the view's dtype.
inline void assign(const TensorView& view, std::span<const double> values) {
  ASSERT_EQ(static_cast<std::int64_t>(values.size()), view.numel());
  for_each_element(view, [&](const auto&, std::byte* address, std::int64_t n) {
    store_element(view.dtype, address, values[static_cast<std::size_t>(n)]);
  });
}

inline Tensor tensor_from(DType dtype, std::initializer_list<std::int64_t> shape,
                          std::span<const double> values) {
  Tensor tensor = Tensor::empty(dtype, shape);
  assign(tensor, values);
  return tensor;
}

/// Number `index` of stream `seed`: SplitMix64's finaliser over a counter, so that any element can
/// be made alone, in any order.
inline std::uint64_t random_bits(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed * 0xd1342543de82ef95u + (index + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// In (0, 1).
inline double random_unit(std::uint64_t seed, std::uint64_t index) {
  return (static_cast<double>(random_bits(seed, index) >> 11) + 0.5) * 0x1p-53;
}

/// In [0, bound).
inline std::int64_t random_below(std::uint64_t seed, std::uint64_t index, std::int64_t bound) {
  return static_cast<std::int64_t>(random_bits(seed, index) % static_cast<std::uint64_t>(bound));
}

/// Box-Muller.
inline double random_normal(std::uint64_t seed, std::uint64_t index) {
  const double radius = std::sqrt(-2.0 * std::log(random_unit(seed, 2 * index)));
  return radius * std::cos(2.0 * std::numbers::pi * random_unit(seed, 2 * index + 1));
}

/// Values depend on the seed and the row-major number alone, not on the layout.
inline void fill_normal(const TensorView& view, std::uint64_t seed, double stddev = 1.0) {
  for_each_element(view, [&](const auto&, std::byte* address, std::int64_t n) {
    store_element(view.dtype, address, stddev * random_normal(seed, static_cast<std::uint64_t>(n)));
  });
}

inline void fill_uniform(const TensorView& view, std::uint64_t seed, double low, double high) {
  for_each_element(view, [&](const auto&, std::byte* address, std::int64_t n) {
    const double unit = random_unit(seed, static_cast<std::uint64_t>(n));
    store_element(view.dtype, address, low + (high - low) * unit);
  });
}

/// All ones: a NaN in f32, f16, bf16 and the 8-bit floats. In integers it is -1, which has a
/// meaning in slot mappings: poison those with a wrong id instead.
inline constexpr std::byte kPoison{0xff};

inline void poison_bytes(void* memory, std::int64_t bytes) {
  std::fill_n(static_cast<std::byte*>(memory), bytes, kPoison);
}

/// Only the view's own elements; the bytes between them stay.
inline void poison(const TensorView& view) {
  const auto element_bytes = static_cast<std::size_t>(bits_of(view.dtype) / 8);
  for_each_element(view, [&](const auto&, std::byte* address, std::int64_t) {
    std::memset(address, std::to_integer<int>(kPoison), element_bytes);
  });
}

/// What support/cuda_memory.cc replaces where there is a device.
struct DeviceHooks {
  /// Fills memory of the host or the device.
  void (*fill)(void* memory, std::byte value, std::int64_t bytes) =
      [](void* memory, std::byte value, std::int64_t bytes) {
        std::fill_n(static_cast<std::byte*>(memory), bytes, value);
      };
  /// Makes memory that is not of the heap addressable by the device, and no longer.
  void (*lend)(void* memory, std::int64_t bytes) = [](void*, std::int64_t) {};
  void (*take_back)(void* memory) = [](void*) {};
};
inline DeviceHooks device_hooks;

/// Everything that is not taken. Starts the peak anew.
inline void poison(Workspace& workspace) {
  {
    WorkspaceScope scope(workspace);
    const std::int64_t bytes = workspace.capacity() - workspace.used();
    device_hooks.fill(scope.take_bytes(bytes), kPoison, bytes);
  }
  workspace.reset_peak();
}

inline ::testing::AssertionResult still_poisoned(const void* memory, std::int64_t bytes) {
  const auto* bytes_at = static_cast<const std::byte*>(memory);
  for (std::int64_t i = 0; i < bytes; ++i) {
    if (bytes_at[i] != kPoison) {
      return ::testing::AssertionFailure() << "byte " << i << " of " << bytes << " was written";
    }
  }
  return ::testing::AssertionSuccess();
}

/// A view with unowned memory around and inside it: `lead` elements before, and `gap` elements
/// after each row of the innermost dimension, all poisoned, the view's elements too.
class PaddedTensor {
 public:
  PaddedTensor(DType dtype, std::initializer_list<std::int64_t> shape, std::int64_t gap = 5,
               std::int64_t lead = 3) {
    std::vector<std::int64_t> padded(shape);
    const std::int64_t innermost = padded.back();
    padded.back() += gap;
    std::int64_t count = lead;
    std::int64_t rows = 1;
    for (std::size_t d = 0; d + 1 < padded.size(); ++d) rows *= padded[d];
    count += rows * padded.back();
    storage_ = Tensor::empty(dtype, {count});
    poison_bytes(storage_.view().data, storage_.nbytes());
    view_ = TensorView::contiguous(
                static_cast<std::byte*>(storage_.view().data) + lead * (bits_of(dtype) / 8), dtype,
                padded)
                .slice(static_cast<int>(padded.size()) - 1, 0, innermost);
  }

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }

  /// True while every byte that is not the view's own still holds the poison.
  ::testing::AssertionResult padding_untouched() const {
    const auto bytes = static_cast<std::size_t>(storage_.nbytes());
    const auto* base = static_cast<const std::byte*>(storage_.view().data);
    std::vector<bool> owned(bytes, false);
    const auto element_bytes = static_cast<std::size_t>(bits_of(view_.dtype) / 8);
    for_each_element(view_, [&](const auto&, const std::byte* address, std::int64_t) {
      for (std::size_t b = 0; b < element_bytes; ++b) {
        owned[static_cast<std::size_t>(address - base) + b] = true;
      }
    });
    for (std::size_t i = 0; i < bytes; ++i) {
      if (!owned[i] && base[i] != kPoison) {
        return ::testing::AssertionFailure()
               << "byte " << i << " outside of " << to_string(view_) << " was written";
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  Tensor storage_;
  TensorView view_;
};

/// With rows that begin at multiples of 16 bytes, as fast kernels want them, or at odd places.
inline PaddedTensor padded_rows(DType dtype, std::initializer_list<std::int64_t> shape,
                                bool aligned) {
  return aligned ? PaddedTensor(dtype, shape, 8, 8) : PaddedTensor(dtype, shape);
}

}  // namespace fovea::test
