// Included by one file per instruction set. Everything has internal linkage and nothing comes from
// the standard library but types: an inline function of this unit must not be the copy that the
// linker keeps for the others.

#include <cstdint>

#include "linear/plain_kernels.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace fovea {
namespace {

using Floats = float __attribute__((vector_size(32)));
using Words = std::uint32_t __attribute__((vector_size(32)));
using Halves = std::uint16_t __attribute__((vector_size(16)));

constexpr int kLanes = 8;

struct F32 {
  using Storage = float;
};
struct F16 {
  using Storage = std::uint16_t;
};
struct BF16 {
  using Storage = std::uint16_t;
};

#define FOVEA_INLINE inline __attribute__((always_inline))

template <class V>
FOVEA_INLINE void load(const void* from, V& to) {
  __builtin_memcpy(&to, from, sizeof(V));
}

FOVEA_INLINE void multiply_add(const Floats& a, const Floats& b, Floats& sum) {
#ifdef __FMA__
  sum = _mm256_fmadd_ps(a, b, sum);
#else
  sum += a * b;
#endif
}

/// Eight halves as floats.
FOVEA_INLINE void widen_halves(const Halves& halves, Floats& to) {
#ifdef __F16C__
  to = _mm256_cvtph_ps(reinterpret_cast<__m128i>(halves));
#else
  const Words bits = __builtin_convertvector(halves, Words);
  const Words magnitude = bits & 0x7fff;
  // Exponent bias 127 instead of 15: a factor of 2^112, exact for subnormals too.
  const Floats scaled = reinterpret_cast<Floats>(magnitude << 13) * 0x1p112f;
  const Words special = reinterpret_cast<Words>(magnitude >= 0x7c00) & 0x7f800000u;
  to = reinterpret_cast<Floats>(reinterpret_cast<Words>(scaled) | special | (bits & 0x8000) << 16);
#endif
}

/// One depth of a panel: columns 0 to 7 and 8 to 15.
FOVEA_INLINE void load_panel_row(const float* row, Floats& low, Floats& high, F32) {
  load(row, low);
  load(row + kLanes, high);
}
FOVEA_INLINE void load_panel_row(const std::uint16_t* row, Floats& low, Floats& high, BF16) {
  Words pairs;
  load(row, pairs);
  low = reinterpret_cast<Floats>(pairs << 16);
  high = reinterpret_cast<Floats>(pairs & 0xffff0000u);
}
FOVEA_INLINE void load_panel_row(const std::uint16_t* row, Floats& low, Floats& high, F16) {
  Halves halves;
  load(row, halves);
  widen_halves(halves, low);
  load(row + kLanes, halves);
  widen_halves(halves, high);
}

/// Round to nearest even, once.
FOVEA_INLINE void narrow(const Floats& from, float* to, F32) {
  __builtin_memcpy(to, &from, sizeof from);
}
FOVEA_INLINE void narrow(const Floats& from, std::uint16_t* to, BF16) {
  const Words bits = reinterpret_cast<Words>(from);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words quiet_nan = (bits >> 16) | 0x40;
  const Words is_nan = reinterpret_cast<Words>((bits & 0x7fffffff) > 0x7f800000u);
  const Halves halves = __builtin_convertvector((is_nan & quiet_nan) | (~is_nan & rounded), Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
}
FOVEA_INLINE void narrow(const Floats& from, std::uint16_t* to, F16) {
#ifdef __F16C__
  const __m128i halves = _mm256_cvtps_ph(from, _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(to, &halves, sizeof halves);
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = fovea::narrow<Float16>(from[lane]).bits;
#endif
}

/// kRows rows by one panel. Each sum has kSteps parts, over every kSteps-th depth, so that
/// additions of few rows do not wait for each other.
template <class T, int kRows, int kSteps>
FOVEA_INLINE void multiply_tile(const PanelProduct& p, const typename T::Storage* panel,
                                std::int64_t first_row, std::int64_t first_column) {
  Floats sums[kSteps][kRows][2] = {};
  const float* x = p.x + first_row * p.x_stride;
  const auto step = [&](std::int64_t d, int s) __attribute__((always_inline)) {
    Floats low, high;  // [8] and [8] columns
    load_panel_row(panel + d * kPanelColumns, low, high, T{});
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float value = x[r * p.x_stride + d];
      const Floats broadcast = {value, value, value, value, value, value, value, value};
      multiply_add(broadcast, low, sums[s][r][0]);
      multiply_add(broadcast, high, sums[s][r][1]);
    }
  };
  std::int64_t depth = 0;
  for (; depth + kSteps <= p.depth; depth += kSteps) {
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) step(depth + s, s);
  }
  for (; depth < p.depth; ++depth) step(depth, 0);

  const std::int64_t columns =
      p.columns - first_column < kPanelColumns ? p.columns - first_column : kPanelColumns;
  Floats bias[2] = {};
  if (p.bias != nullptr) {
    __builtin_memcpy(bias, p.bias + first_column,
                     static_cast<std::size_t>(columns) * sizeof(float));
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int s = 1; s < kSteps; ++s) {
      sums[0][r][0] += sums[s][r][0];
      sums[0][r][1] += sums[s][r][1];
    }
    typename T::Storage* out =
        static_cast<typename T::Storage*>(p.out) + (first_row + r) * p.out_stride + first_column;
    typename T::Storage row[kPanelColumns];
    narrow(sums[0][r][0] + bias[0], row, T{});
    narrow(sums[0][r][1] + bias[1], row + kLanes, T{});
    if (columns == kPanelColumns) {
      __builtin_memcpy(out, row, sizeof row);
    } else {
      __builtin_memcpy(out, row, static_cast<std::size_t>(columns) * sizeof row[0]);
    }
  }
}

#ifdef __AVX2__
// 6 rows by 2 vectors are 12 of 16 registers; the others hold a panel row and a broadcast.
constexpr std::int64_t kTileRows = 6;
#else
// Registers are half as wide: 2 rows take 8 of 16.
constexpr std::int64_t kTileRows = 2;
#endif

template <class T>
void multiply_panels(const PanelProduct& p) {
  const auto* panel = static_cast<const typename T::Storage*>(p.panels);
  for (std::int64_t column = 0; column < p.columns;
       column += kPanelColumns, panel += p.depth * kPanelColumns) {
    std::int64_t row = 0;
    for (; row + kTileRows <= p.rows; row += kTileRows) {
      multiply_tile<T, kTileRows, 1>(p, panel, row, column);
    }
#ifdef __AVX2__
    switch (p.rows - row) {
      case 1:
        multiply_tile<T, 1, 4>(p, panel, row, column);
        break;
      case 2:
        multiply_tile<T, 2, 2>(p, panel, row, column);
        break;
      case 3:
        multiply_tile<T, 3, 2>(p, panel, row, column);
        break;
      case 4:
        multiply_tile<T, 4, 1>(p, panel, row, column);
        break;
      case 5:
        multiply_tile<T, 5, 1>(p, panel, row, column);
        break;
      default:
        break;
    }
#else
    if (row < p.rows) multiply_tile<T, 1, 2>(p, panel, row, column);
#endif
  }
}

using Bytes = std::uint8_t __attribute__((vector_size(8)));

/// Eight f8e4m3fn as floats: f16 bits with the same exponent field, 2^-8 of the value, times 2^8.
FOVEA_INLINE void decode_e4m3(const std::uint8_t* from, Floats& to) {
  Bytes bytes;
  load(from, bytes);
  const Halves codes = __builtin_convertvector(bytes, Halves);
  const Halves magnitude = (codes & 0x7f) << 7;
  const Halves is_nan = reinterpret_cast<Halves>(magnitude == 0x7f << 7);
  const Halves halves = magnitude | (codes & 0x80) << 8 | (is_nan & 0x7e00);
  widen_halves(halves, to);
  to *= 256.f;
}

/// Eight bytes of two f4e2m1 as floats: f16 bits with the same exponent field, 2^-14 of the value.
FOVEA_INLINE void decode_e2m1(const std::uint8_t* from, Floats& low, Floats& high) {
  Bytes bytes;
  load(from, bytes);
  const Halves pairs = __builtin_convertvector(bytes, Halves);
  widen_halves((pairs & 0x07) << 9 | (pairs & 0x08) << 12, low);
  widen_halves((pairs & 0x70) << 5 | (pairs & 0x80) << 8, high);
  low *= 0x1p14f;
  high *= 0x1p14f;
}

/// Depth that is decoded at a time: a piece of a panel (256 x 16 floats) is half of L1.
constexpr std::int64_t kCodeDepth = 256;

/// kRows rows by a decoded piece of a panel; `sums` [rows][kPanelColumns] are continued.
template <int kRows>
FOVEA_INLINE void continue_tile(const CodeProduct& p, const float* piece, std::int64_t begin,
                                std::int64_t end, std::int64_t first_row, float* sums) {
  Floats sum[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    load(sums + (first_row + r) * kPanelColumns, sum[r][0]);
    load(sums + (first_row + r) * kPanelColumns + kLanes, sum[r][1]);
  }
  const float* x = p.x + first_row * p.x_stride;
  for (std::int64_t d = begin; d < end; ++d) {
    Floats low, high;
    load_panel_row(piece + (d - begin) * kPanelColumns, low, high, F32{});
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float value = x[r * p.x_stride + d];
      const Floats broadcast = {value, value, value, value, value, value, value, value};
      multiply_add(broadcast, low, sum[r][0]);
      multiply_add(broadcast, high, sum[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    __builtin_memcpy(sums + (first_row + r) * kPanelColumns, &sum[r][0], sizeof(Floats));
    __builtin_memcpy(sums + (first_row + r) * kPanelColumns + kLanes, &sum[r][1], sizeof(Floats));
  }
}

/// Depths [begin, end) of a panel, within one group.
FOVEA_INLINE void decode_piece(const std::uint8_t* codes, bool is_mxfp4, const float* scales,
                               std::int64_t begin, std::int64_t end, float* piece) {
  Floats low, high;
  load(scales, low);
  load(scales + kLanes, high);
  for (std::int64_t d = begin; d < end; ++d, piece += kPanelColumns) {
    Floats values[2];
    if (is_mxfp4) {
      decode_e2m1(codes + d * kLanes, values[0], values[1]);
    } else {
      decode_e4m3(codes + d * kPanelColumns, values[0]);
      decode_e4m3(codes + d * kPanelColumns + kLanes, values[1]);
    }
    values[0] *= low;
    values[1] *= high;
    __builtin_memcpy(piece, values, sizeof values);
  }
}

/// Adds the bias and rounds, once.
template <class T>
FOVEA_INLINE void write_sums(const CodeProduct& p, const float* sums, std::int64_t first_column) {
  const std::int64_t columns =
      p.columns - first_column < kPanelColumns ? p.columns - first_column : kPanelColumns;
  Floats bias[2] = {};
  if (p.bias != nullptr) {
    __builtin_memcpy(bias, p.bias + first_column,
                     static_cast<std::size_t>(columns) * sizeof(float));
  }
  for (std::int64_t r = 0; r < p.rows; ++r) {
    Floats sum[2];
    __builtin_memcpy(sum, sums + r * kPanelColumns, sizeof sum);
    typename T::Storage row[kPanelColumns];
    narrow(sum[0] + bias[0], row, T{});
    narrow(sum[1] + bias[1], row + kLanes, T{});
    auto* out = static_cast<typename T::Storage*>(p.out) + r * p.out_stride + first_column;
    __builtin_memcpy(out, row, static_cast<std::size_t>(columns) * sizeof row[0]);
  }
}

template <class T>
void multiply_codes(const CodeProduct& p) {
  const std::int64_t groups = (p.depth + p.group_depth - 1) / p.group_depth;
  const std::int64_t row_bytes = p.is_mxfp4 ? kLanes : kPanelColumns;
  const std::uint8_t* codes = p.codes;
  const float* scales = p.scales;
  for (std::int64_t column = 0; column < p.columns; column += kPanelColumns,
                    codes += p.depth * row_bytes, scales += groups * kPanelColumns) {
    alignas(32) float sums[kCodeRows * kPanelColumns] = {};
    for (std::int64_t begin = 0; begin < p.depth;) {
      const std::int64_t group = begin / p.group_depth;
      const std::int64_t group_end = (group + 1) * p.group_depth;
      std::int64_t end = begin + kCodeDepth < p.depth ? begin + kCodeDepth : p.depth;
      if (group_end < end) end = group_end;
      alignas(32) float piece[kCodeDepth * kPanelColumns];
      decode_piece(codes, p.is_mxfp4, scales + group * kPanelColumns, begin, end, piece);
      std::int64_t row = 0;
      for (; row + kTileRows <= p.rows; row += kTileRows) {
        continue_tile<kTileRows>(p, piece, begin, end, row, sums);
      }
      for (; row + 2 <= p.rows; row += 2) continue_tile<2>(p, piece, begin, end, row, sums);
      if (row < p.rows) continue_tile<1>(p, piece, begin, end, row, sums);
      begin = end;
    }
    write_sums<T>(p, sums, column);
  }
}

void widen_f16(const void* from, float* to, std::int64_t count) {
  const auto* source = static_cast<const std::uint16_t*>(from);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t n = count - i < kLanes ? count - i : kLanes;
    Halves halves = {};
    __builtin_memcpy(&halves, source + i, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
    Floats floats;
    widen_halves(halves, floats);
    __builtin_memcpy(to + i, &floats, static_cast<std::size_t>(n) * sizeof(float));
  }
}

void widen_bf16(const void* from, float* to, std::int64_t count) {
  const auto* source = static_cast<const std::uint16_t*>(from);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t n = count - i < kLanes ? count - i : kLanes;
    Halves halves = {};
    __builtin_memcpy(&halves, source + i, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
    const Words words = __builtin_convertvector(halves, Words) << 16;
    __builtin_memcpy(to + i, &words, static_cast<std::size_t>(n) * sizeof(float));
  }
}

FOVEA_INLINE void widen(const Floats& from, Floats& to, F32) { to = from; }
FOVEA_INLINE void widen(const Halves& from, Floats& to, F16) { widen_halves(from, to); }
FOVEA_INLINE void widen(const Halves& from, Floats& to, BF16) {
  to = reinterpret_cast<Floats>(__builtin_convertvector(from, Words) << 16);
}

template <class T, class Vector>
void add_floats(const float* from, void* to, std::int64_t count) {
  auto* target = static_cast<typename T::Storage*>(to);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const auto n = static_cast<std::size_t>(count - i < kLanes ? count - i : kLanes);
    Vector old = {};
    Floats sum, addend = {};
    __builtin_memcpy(&old, target + i, n * sizeof(typename T::Storage));
    __builtin_memcpy(&addend, from + i, n * sizeof(float));
    widen(old, sum, T{});
    typename T::Storage row[kLanes];
    narrow(sum + addend, row, T{});
    __builtin_memcpy(target + i, row, n * sizeof(typename T::Storage));
  }
}

constexpr PlainKernels kernels_named(const char* isa) {
  return {.isa = isa,
          .multiply_f32 = multiply_panels<F32>,
          .multiply_f16 = multiply_panels<F16>,
          .multiply_bf16 = multiply_panels<BF16>,
          .multiply_codes_f32 = multiply_codes<F32>,
          .multiply_codes_f16 = multiply_codes<F16>,
          .multiply_codes_bf16 = multiply_codes<BF16>,
          .widen_f16 = widen_f16,
          .widen_bf16 = widen_bf16,
          .add_f32 = add_floats<F32, Floats>,
          .add_f16 = add_floats<F16, Halves>,
          .add_bf16 = add_floats<BF16, Halves>};
}

}  // namespace
}  // namespace fovea
