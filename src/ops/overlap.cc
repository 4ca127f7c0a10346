#include "ops/overlap.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>

namespace fovea {
namespace {

/// coefficient * x with x in [0, bound].
struct Term {
  std::int64_t coefficient = 0;
  std::int64_t bound = 0;
};

/// Is some sum of terms equal to a target? Each view gives a term per dimension and one for the
/// bytes of an element.
class BoundedSum {
 public:
  void add(std::int64_t coefficient, std::int64_t bound) {
    if (coefficient == 0 || bound == 0) return;
    for (std::size_t i = 0; i < size_; ++i) {
      if (terms_[i].coefficient == coefficient) {
        terms_[i].bound += bound;
        return;
      }
    }
    terms_[size_++] = {coefficient, bound};
  }

  bool reaches(std::int64_t target) {
    // Unused terms are zero and come last.
    std::sort(terms_.begin(), terms_.end(),
              [](const Term& a, const Term& b) { return a.coefficient > b.coefficient; });
    std::int64_t reach = 0;
    std::int64_t gcd = 0;
    for (std::size_t i = size_; i-- > 0;) {
      reach += terms_[i].coefficient * terms_[i].bound;
      gcd = std::gcd(gcd, terms_[i].coefficient);
      reach_from_[i] = reach;
      gcd_from_[i] = gcd;
    }
    steps_left_ = kMaxSteps;
    return reaches_from(0, target);
  }

 private:
  bool reaches_from(std::size_t i, std::int64_t target) {
    if (target == 0) return true;
    if (i == size_ || target < 0 || target > reach_from_[i] || target % gcd_from_[i] != 0) {
      return false;
    }
    const auto [coefficient, bound] = terms_[i];
    const std::int64_t rest = i + 1 < size_ ? reach_from_[i + 1] : 0;
    const std::int64_t low = std::max<std::int64_t>(
        0, target > rest ? (target - rest + coefficient - 1) / coefficient : 0);
    const std::int64_t high = std::min(bound, target / coefficient);
    for (std::int64_t x = low; x <= high; ++x) {
      if (--steps_left_ < 0) return false;
      if (reaches_from(i + 1, target - coefficient * x)) return true;
    }
    return false;
  }

  // Nested strides, all that real tensors have, are decided in tens of steps. What is not decided
  // by then counts as disjoint: the check is there to catch mistakes, not to refuse what may be
  // right.
  static constexpr int kMaxSteps = 20000;
  static constexpr std::size_t kMaxTerms = 2 * (kMaxRank + 1);

  std::array<Term, kMaxTerms> terms_{};
  std::array<std::int64_t, kMaxTerms> reach_from_{};
  std::array<std::int64_t, kMaxTerms> gcd_from_{};
  std::size_t size_ = 0;
  int steps_left_ = 0;
};

/// Bytes [low, high) that a view spans, relative to its data pointer.
struct Extent {
  std::int64_t low = 0;
  std::int64_t high = 0;
};

Extent extent_of(const TensorView& view) {
  const std::int64_t element = bytes_of(view.dtype, 1);
  Extent extent{0, element};
  for (std::size_t d = 0; d < static_cast<std::size_t>(view.ndim); ++d) {
    const std::int64_t reach = (view.shape[d] - 1) * view.strides[d] * element;
    (reach < 0 ? extent.low : extent.high) += reach;
  }
  return extent;
}

void add_view(BoundedSum& sum, const TensorView& view) {
  const std::int64_t element = bytes_of(view.dtype, 1);
  sum.add(1, element - 1);
  for (std::size_t d = 0; d < static_cast<std::size_t>(view.ndim); ++d) {
    sum.add(std::abs(view.strides[d]) * element, view.shape[d] - 1);
  }
}

}  // namespace

bool overlaps(const TensorView& a, const TensorView& b) {
  if (!a || !b || a.numel() == 0 || b.numel() == 0) return false;
  const Extent in_a = extent_of(a);
  const Extent in_b = extent_of(b);
  const std::int64_t distance =
      reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
  if (in_a.high <= distance + in_b.low || distance + in_b.high <= in_a.low) return false;

  // low_a + sum(a) = distance + high_b - 1 - sum(b), counting b's offsets down from its last byte.
  BoundedSum sum;
  add_view(sum, a);
  add_view(sum, b);
  return sum.reaches(distance + in_b.high - 1 - in_a.low);
}

bool overlaps_itself(const TensorView& view) {
  if (!view || view.numel() == 0) return false;
  std::array<Term, kMaxRank> dims{};
  for (std::size_t d = 0; d < static_cast<std::size_t>(view.ndim); ++d) {
    dims[d] = {std::abs(view.strides[d]), view.shape[d] - 1};
  }
  std::sort(dims.begin(), dims.end(),
            [](const Term& a, const Term& b) { return a.coefficient < b.coefficient; });
  std::int64_t reach = 0;
  for (const Term& dim : dims) {
    if (dim.bound == 0) continue;
    if (dim.coefficient <= reach) return true;
    reach += dim.coefficient * dim.bound;
  }
  return false;
}

bool is_same_view(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (std::size_t d = 0; d < static_cast<std::size_t>(a.ndim); ++d) {
    if (a.shape[d] != b.shape[d]) return false;
    if (a.shape[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

}  // namespace fovea
