// Matrix products with weights, packed once.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "fovea/tensor.h"
#include "fovea/workspace.h"

namespace fovea {

/// How products are computed. FOVEA_LINEAR=onednn|plain|auto decides where `automatic` is asked
/// for; another value is an error.
enum class LinearBackend : std::uint8_t {
  automatic,  ///< oneDNN where it computes in the weights' dtype in its own layout (AVX-512), else
              ///< plain.
  onednn,     ///< In the weights' dtype where the processor has it, else in f32 with conversion.
  plain,      ///< Threaded loops of this library; any compute dtype.
};

/// One low-rank update W + scale * B A of a projection (LoRA).
struct LoraWeights {
  TensorView a;  ///< [rank, in] of any compute dtype.
  TensorView b;  ///< [out, rank] of any compute dtype.
  float scale = 1.f;
};

/// y = x W^T + bias with W [out_features, in_features]. Immutable but for `reload`; shared freely.
class Linear {
 public:
  Linear();
  /// Copies and packs `weight` [out, in] (any strides) and `bias` [out] (optional), both of one
  /// compute dtype. Throws Error(invalid_argument) on shapes, Error(unsupported) when the forced
  /// backend was not built in.
  Linear(const TensorView& weight, const TensorView& bias,
         LinearBackend backend = LinearBackend::automatic);
  ~Linear();
  Linear(Linear&&) noexcept;
  Linear& operator=(Linear&&) noexcept;

  explicit operator bool() const { return impl_ != nullptr; }
  std::int64_t in_features() const;
  std::int64_t out_features() const;
  DType dtype() const;
  std::int64_t weight_bytes() const;      ///< As packed.
  std::string_view backend_name() const;  ///< "onednn/bf16", "onednn/f32", "plain", ...

  /// x [T, in], out [T, out], both of dtype(), unit innermost stride, any row stride; no overlap.
  /// Sums are f32; a result is rounded once, to nearest even.
  void operator()(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const;
  /// Scratch for T tokens.
  std::int64_t workspace_bytes(std::int64_t tokens) const;
  /// New values in the same storage, so that whoever holds a pointer sees them. Same shapes.
  void reload(const TensorView& weight, const TensorView& bias);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// out[t, n] = x[t, n] W[n] for each head n, W [N, K, M]: the absorbed products of MLA.
class BatchedLinear {
 public:
  BatchedLinear();
  /// `weight` [N, K, M] of a compute dtype, any strides.
  explicit BatchedLinear(const TensorView& weight,
                         LinearBackend backend = LinearBackend::automatic);
  ~BatchedLinear();
  BatchedLinear(BatchedLinear&&) noexcept;
  BatchedLinear& operator=(BatchedLinear&&) noexcept;

  explicit operator bool() const { return impl_ != nullptr; }
  std::int64_t weight_bytes() const;      ///< As packed.
  std::string_view backend_name() const;  ///< As Linear's.
  /// x [T, N, K], out [T, N, M], dtype of the weight, unit innermost stride, any other strides; no
  /// overlap. Sums are f32; a result is rounded once, to nearest even.
  void operator()(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const;
  std::int64_t workspace_bytes(std::int64_t tokens) const;
  void reload(const TensorView& weight);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fovea
