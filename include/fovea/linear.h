// Matrix products with weights, packed once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "fovea/tensor.h"
#include "fovea/workspace.h"

namespace fovea {

/// How products are computed on the host. FOVEA_LINEAR=onednn|plain|auto decides where `automatic`
/// is asked for; another value is an error. Weights on a GPU take `automatic` alone: cuBLASLt.
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

/// Which weights share a scale: blocks of `out` rows times `in` columns of W [out_features,
/// in_features]; 0 is the whole extent. {0, 0} per tensor, {1, 0} per output channel, {128, 128}
/// the blocks of DeepSeek-V3. Blocks at the end may be smaller.
struct WeightGroups {
  std::int64_t out = 0;
  std::int64_t in = 0;
  bool operator==(const WeightGroups&) const = default;
};

/// A weight as checkpoints store it: value = code * scale of its group. What they call
/// weight_scale_inv (DeepSeek-V3) and weight_scale (compressed-tensors) is `scale` here. Either FP8
/// or MXFP4, the OCP microscaling format, which u8 codes stand for.
struct QuantizedWeight {
  /// FP8: f8e4m3fn [out_features, in_features]. MXFP4: u8 [out_features, in_features / 2], two
  /// f4e2m1 each, low nibble first. Unit innermost stride.
  TensorView codes;
  /// [ceil(out_features / out), ceil(in_features / in)]: f32, bf16 or f16; of MXFP4 f8e8m0.
  TensorView scale;
  WeightGroups groups;  ///< Of MXFP4 {1, 32}, in whole groups.
};

/// What an FP8 projection of a layer has besides its codes.
struct WeightScale {
  TensorView scale;  ///< As QuantizedWeight's. Absent: the projection is not quantised.
  WeightGroups groups;
};

/// Throws Error(invalid_argument) that names what does not fit.
void check_quantized_weight(const QuantizedWeight& weight);
/// The float32 products of codes and scales, rounded once to `dtype`.
Tensor dequantize_weight(const QuantizedWeight& weight, DType dtype);

/// The memory of a QuantizedWeight.
struct OwnedQuantizedWeight {
  Tensor codes;
  Tensor scale;  ///< f32, of MXFP4 f8e8m0
  WeightGroups groups;
  operator QuantizedWeight() const { return {codes, scale, groups}; }
};
/// Codes of `weight` [out_features, in_features] of a compute dtype, any strides. The largest
/// finite magnitude of each group becomes the largest code; the rest rounds to nearest even.
OwnedQuantizedWeight quantize_weight(const TensorView& weight, const WeightGroups& groups);
/// The same in MXFP4: the scale of 32 weights is the power of two that takes the largest of them
/// into [3.5, 7) codes.
OwnedQuantizedWeight quantize_weight_mxfp4(const TensorView& weight);

/// y = x W^T + bias with W [out_features, in_features]. Immutable but for `reload`; shared freely.
/// Weights come in host memory and are kept in `memory`, whose device computes.
class Linear {
 public:
  Linear();
  /// Copies and packs `weight` [out, in] (any strides) and `bias` [out] (optional), both of one
  /// compute dtype. Throws Error(invalid_argument) on shapes, Error(unsupported) when the forced
  /// backend was not built in.
  Linear(const TensorView& weight, const TensorView& bias,
         LinearBackend backend = LinearBackend::automatic, const MemorySource& memory = {});
  /// Keeps the codes and decodes them on the way into the product; x, out and `bias` (optional) are
  /// of `dtype`. On a GPU decoded weights are rounded once to `dtype`, unless up to 64 tokens of a
  /// 16-bit dtype meet FP8 codes whose depth and groups of it are multiples of 64. A row of the
  /// identity as x gives the row of dequantize_weight, bit for bit.
  Linear(const QuantizedWeight& weight, const TensorView& bias, DType dtype,
         const MemorySource& memory = {});
  ~Linear();
  Linear(Linear&&) noexcept;
  Linear& operator=(Linear&&) noexcept;

  explicit operator bool() const { return impl_ != nullptr; }
  std::int64_t in_features() const;
  std::int64_t out_features() const;
  DType dtype() const;
  std::int64_t weight_bytes() const;      ///< As packed.
  /// "onednn/bf16", "onednn/f32", "plain", "plain/fp8", "plain/mxfp4"; "cublaslt" and its like.
  std::string_view backend_name() const;
  std::optional<WeightGroups> groups() const;  ///< Of a quantised weight.

  /// x [T, in], out [T, out], both of dtype(), unit innermost stride, any row stride (on a GPU rows
  /// may not overlap); no overlap of the two. Sums are f32; a result is rounded once, to nearest
  /// even.
  void operator()(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const;
  /// Scratch for T tokens.
  std::int64_t workspace_bytes(std::int64_t tokens) const;
  /// New values in the same storage, so that whoever holds a pointer sees them. Same shapes.
  void reload(const TensorView& weight, const TensorView& bias);
  /// The same for a quantised weight with the same groups.
  void reload(const QuantizedWeight& weight, const TensorView& bias);

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
                         LinearBackend backend = LinearBackend::automatic,
                         const MemorySource& memory = {});
  /// A weight [M, K] for each head, all in the same groups, which must divide M and K; x and out
  /// are of `dtype`. FP8 is on both sides: each row of x is rounded to f8e4m3fn in groups of
  /// `groups.in` channels with scales of their own. With MXFP4 x stays as it is.
  BatchedLinear(std::span<const QuantizedWeight> heads, DType dtype,
                const MemorySource& memory = {});
  ~BatchedLinear();
  BatchedLinear(BatchedLinear&&) noexcept;
  BatchedLinear& operator=(BatchedLinear&&) noexcept;

  explicit operator bool() const { return impl_ != nullptr; }
  std::int64_t weight_bytes() const;      ///< As packed.
  std::string_view backend_name() const;  ///< As Linear's.
  /// x [T, N, K], out [T, N, M], of the weights' dtype or the one they were made with, unit
  /// innermost stride, any other strides (on a GPU rows may not overlap); no overlap of the two.
  /// Sums are f32; a result is rounded once, to nearest even.
  void operator()(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const;
  std::int64_t workspace_bytes(std::int64_t tokens) const;
  void reload(const TensorView& weight);
  void reload(std::span<const QuantizedWeight> heads);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fovea
