// What Linear and BatchedLinear are made of: one batched product with packed weights.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "fovea/linear.h"
#include "fovea/tensor.h"
#include "fovea/workspace.h"

namespace fovea {

/// out[t, n] = x[t, n] W[n] + bias with W [N, K, M]. Linear is the case N = 1.
struct ProductShape {
  std::int64_t heads = 1;    ///< N
  std::int64_t depth = 0;    ///< K
  std::int64_t columns = 0;  ///< M
  DType dtype = DType::f32;
  bool has_bias = false;  ///< [M], with N = 1 only.
  /// Rows of x are rounded to FP8 in the groups of the depth; QuantizedProduct only.
  bool quantizes_x = false;
  bool is_mxfp4 = false;  ///< Codes are f4e2m1, else f8e4m3fn; QuantizedProduct only.
};

/// MXFP4's codes are u8.
inline bool is_mxfp4(const QuantizedWeight& weight) { return weight.codes.dtype == DType::u8; }
/// Of a checked weight.
inline std::int64_t in_features(const QuantizedWeight& weight) {
  return weight.codes.shape[1] * (is_mxfp4(weight) ? 2 : 1);
}
/// The extent of groups, with what 0 stands for filled in; no larger than all there is.
inline std::int64_t group_extent(std::int64_t group, std::int64_t extent) {
  return group > 0 && group < extent ? group : extent;
}
inline std::int64_t num_groups(std::int64_t extent, std::int64_t group) {
  return (extent + group_extent(group, extent) - 1) / group_extent(group, extent);
}
/// Of group [i, j], in float32.
float scale_at(const TensorView& scale, std::int64_t i, std::int64_t j);

class Product {
 public:
  explicit Product(const ProductShape& shape) : shape_(shape) {}
  virtual ~Product() = default;

  const ProductShape& shape() const { return shape_; }
  virtual std::string_view name() const = 0;
  /// Where weights lie and run() computes.
  virtual Device device() const { return {}; }
  virtual std::int64_t weight_bytes() const = 0;
  virtual std::int64_t workspace_bytes(std::int64_t tokens) const = 0;
  /// x [T, N, K] and out [T, N, M], checked, T > 0, with unit innermost strides.
  virtual void run(const ExecutionContext& ctx, const TensorView& x,
                   const TensorView& out) const = 0;

 private:
  ProductShape shape_;
};

/// With weights of a compute dtype.
class DenseProduct : public Product {
 public:
  using Product::Product;
  /// Packs weight [N, K, M] of any strides and bias [M] into the storage made at construction.
  virtual void load(const TensorView& weight, const TensorView& bias) = 0;
};

/// With one FP8 or FP4 code per weight and float32 scales of groups; `shape.dtype` is that of x and
/// out. Codes are decoded on the way into the product; make_*_product says how far.
class QuantizedProduct : public Product {
 public:
  using Product::Product;
  /// Codes [M, K] of each head and their scales, checked, and bias [M], into the storage made at
  /// construction.
  virtual void load(std::span<const QuantizedWeight> heads, const TensorView& bias) = 0;
};

/// Rows of one pass when a pass needs `bytes_per_row` of scratch: few enough that the scratch stays
/// in the outer caches, enough that the weights are read seldom.
constexpr std::int64_t scratch_rows(std::int64_t bytes_per_row, std::int64_t tokens) {
  constexpr std::int64_t kScratchBytes = 8 << 20, kMinRows = 64;
  std::int64_t rows = kScratchBytes / bytes_per_row;
  if (rows < kMinRows) rows = kMinRows;
  return rows < tokens ? rows : tokens;
}

struct PlainKernels;
std::unique_ptr<DenseProduct> make_plain_product(const ProductShape& shape);
std::unique_ptr<DenseProduct> make_plain_product(const ProductShape& shape,
                                                 const PlainKernels& kernels);

std::unique_ptr<QuantizedProduct> make_quantized_product(const ProductShape& shape,
                                                         const WeightGroups& groups);
std::unique_ptr<QuantizedProduct> make_quantized_product(const ProductShape& shape,
                                                         const WeightGroups& groups,
                                                         const PlainKernels& kernels);

/// On the device of `memory`. Throw Error(unsupported) where cuBLASLt is not there.
std::unique_ptr<DenseProduct> make_cublaslt_product(const ProductShape& shape,
                                                    const MemorySource& memory);
std::unique_ptr<QuantizedProduct> make_cublaslt_quantized_product(const ProductShape& shape,
                                                                  const WeightGroups& groups,
                                                                  const MemorySource& memory);

/// Null when oneDNN was not built in.
std::unique_ptr<DenseProduct> make_onednn_product(const ProductShape& shape);
/// Null too where the plain product is faster.
std::unique_ptr<DenseProduct> make_onednn_product_where_fastest(const ProductShape& shape);

}  // namespace fovea
