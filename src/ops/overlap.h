// Whether views share memory. Bounding boxes do not answer that: column slices of one projection
// interleave without sharing a byte.
#pragma once

#include "fovea/tensor.h"

namespace fovea {

/// Whether an element of `a` shares a byte with an element of `b`. Views with whole-byte dtypes.
bool overlaps(const TensorView& a, const TensorView& b);

/// Whether two elements of `view` may be the same memory: broadcast or folded views.
bool overlaps_itself(const TensorView& view);

/// The same elements in the same places: for these an op that works row by row may run in place.
bool is_same_view(const TensorView& a, const TensorView& b);

}  // namespace fovea
