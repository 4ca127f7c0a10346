// A projection's weight, dense or FP8, on its way into a layer's products.
#pragma once

#include <cstdint>
#include <span>

#include "fovea/linear.h"

namespace fovea {

/// Views of the caller's weights, [out, in].
struct Projection {
  const char* name = "";  ///< For error texts.
  TensorView weight;      ///< Of the layer's dtype, or f8e4m3fn.
  WeightScale scale;      ///< With f8e4m3fn.

  bool is_quantized() const { return weight.dtype == DType::f8e4m3fn; }
  QuantizedWeight quantized() const { return {weight, scale.scale, scale.groups}; }
};

/// Throws Error(invalid_argument) that names the projection unless it is there, with these extents,
/// either of `dtype` or FP8 with a scale that fits.
void check_projection(const Projection& projection, DType dtype, std::int64_t out, std::int64_t in);
/// The same unless `linear` holds a weight like this one.
void check_reload(const Projection& projection, const Linear& linear);

Linear make_linear(const Projection& projection, const TensorView& bias, DType dtype,
                   LinearBackend backend, const MemorySource& memory);
void reload(const Projection& projection, const TensorView& bias, Linear& linear);

/// The weight in `dtype`: a view of the projection's where it is dense.
class DenseWeight {
 public:
  DenseWeight(const Projection& projection, DType dtype);
  operator const TensorView&() const { return view_; }

 private:
  Tensor memory_;
  TensorView view_;
};

/// A projection that owns its weight.
struct OwnedProjection {
  Tensor weight;
  Tensor scale;  ///< f32 [out, groups of the input], of FP8.
  Projection projection;
};

/// Checked projections of one input as one, their rows one after another. FP8 where all of them
/// are, each row with scales of its own, as the parts need not end where groups of rows do; dense
/// of `dtype` otherwise. Throws Error(invalid_argument) unless the groups of FP8 parts have one
/// width.
OwnedProjection fuse(std::span<const Projection> parts, DType dtype);

/// Rows [begin, end) of each of `heads` equal parts of a checked projection, one after another.
OwnedProjection rows_of_heads(const Projection& projection, std::int64_t heads, std::int64_t begin,
                              std::int64_t end);

}  // namespace fovea
