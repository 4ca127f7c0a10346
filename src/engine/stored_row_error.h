// How far a row of a cache is from what its format makes of the oracle's.
#pragma once

#include <cstddef>
#include <span>

#include "fovea/kv_format.h"

namespace fovea::engine {

struct StoredRowError {
  /// Distances from the expected values, as far as half a step of their codes does not explain
  /// them: their norm over the row's, or a third of the worst one over its value or the root mean
  /// square of those that share its scale, whichever is larger. (Of some hundred random errors the
  /// worst is about three times their root mean square.) Infinite where there is a NaN.
  double error = 0;
  std::size_t element = 0;  ///< The worst.
};

/// `expected` [row_elements] is what was to be stored, `stored` what the row decodes to. Steps come
/// from scales of the expected values, so that a wrong scale is no excuse.
StoredRowError stored_row_error(const KvFormat& format, std::span<const double> expected,
                                std::span<const double> stored);

}  // namespace fovea::engine
