// The inner loops of the plain product, built once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea {

/// Columns of a panel: two vectors of eight floats.
inline constexpr std::int64_t kPanelColumns = 16;

/// Rows of x times consecutive panels. A panel holds kPanelColumns columns of W, depth by depth:
/// [depth, kPanelColumns] weights; in bf16 column c lies next to column c + 8, so that a 32-bit
/// lane splits into two floats by a shift and a mask.
struct PanelProduct {
  const float* x = nullptr;  ///< [rows, depth]
  std::int64_t x_stride = 0;
  std::int64_t rows = 0;
  std::int64_t depth = 0;
  const void* panels = nullptr;
  std::int64_t columns = 0;     ///< The last panel may have fewer than kPanelColumns.
  const float* bias = nullptr;  ///< [columns], null: none.
  void* out = nullptr;          ///< [rows, columns] of the weights' dtype.
  std::int64_t out_stride = 0;
};

/// Rows of a CodeProduct at most: their sums over a panel stay in L1.
inline constexpr std::int64_t kCodeRows = 64;

/// Bytes of a row of a panel's codes: of f4e2m1 column c lies in the low half of byte c and column
/// c + 8 in its high half.
constexpr std::int64_t code_row_bytes(bool is_mxfp4) {
  return is_mxfp4 ? kPanelColumns / 2 : kPanelColumns;
}

/// The same with codes: [depth, code_row_bytes] per panel, decoded a piece of the depth at a time
/// and used for all rows.
struct CodeProduct {
  const float* x = nullptr;  ///< [rows, depth], at most kCodeRows.
  std::int64_t x_stride = 0;
  std::int64_t rows = 0;
  std::int64_t depth = 0;
  const std::uint8_t* codes = nullptr;
  bool is_mxfp4 = false;  ///< Codes are f4e2m1, else f8e4m3fn.
  /// [panels][groups of the depth][kPanelColumns] scale of each column.
  const float* scales = nullptr;
  std::int64_t group_depth = 0;  ///< Depth of a group.
  std::int64_t columns = 0;      ///< The last panel may have fewer than kPanelColumns.
  const float* bias = nullptr;   ///< [columns], null: none.
  void* out = nullptr;           ///< [rows, columns]
  std::int64_t out_stride = 0;
};

struct PlainKernels {
  const char* isa;
  void (*multiply_f32)(const PanelProduct&);
  void (*multiply_f16)(const PanelProduct&);
  void (*multiply_bf16)(const PanelProduct&);
  /// By dtype of `out`.
  void (*multiply_codes_f32)(const CodeProduct&);
  void (*multiply_codes_f16)(const CodeProduct&);
  void (*multiply_codes_bf16)(const CodeProduct&);
  void (*widen_f16)(const void* from, float* to, std::int64_t count);
  void (*widen_bf16)(const void* from, float* to, std::int64_t count);
  /// to[i] += from[i], rounded to the dtype once.
  void (*add_f32)(const float* from, void* to, std::int64_t count);
  void (*add_f16)(const float* from, void* to, std::int64_t count);
  void (*add_bf16)(const float* from, void* to, std::int64_t count);
};

extern const PlainKernels kPlainKernelsScalar;
extern const PlainKernels kPlainKernelsAvx2;

/// The best that this processor runs.
const PlainKernels& plain_kernels();

}  // namespace fovea
