// Expected results of ragged requests, laid out as the kernels do.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "cases/operands.h"
#include "fovea/oracle.h"

namespace fovea::cases {

/// Padding rows are empty.
class RaggedResult {
 public:
  RaggedResult(std::int64_t tokens, std::int64_t heads, std::int64_t v_dim)
      : tokens_(tokens),
        heads_(heads),
        v_dim_(v_dim),
        out_(static_cast<std::size_t>(tokens * heads * v_dim), 0.0),
        lse_(static_cast<std::size_t>(tokens * heads), -std::numeric_limits<double>::infinity()) {}

  void place(const oracle::AttentionResult& part, std::int64_t first_token) {
    std::copy(part.out.begin(), part.out.end(), out_.begin() + first_token * heads_ * v_dim_);
    const auto queries = static_cast<std::int64_t>(part.lse.size()) / heads_;
    for (std::int64_t n = 0; n < heads_; ++n) {
      std::copy_n(part.lse.begin() + n * queries, queries,
                  lse_.begin() + n * tokens_ + first_token);
    }
  }
  /// Without lse where that was not asked for.
  CheckResult check(const Array& out, const Array& lse, double limit) const {
    RowChecker checker(limit, kSmallOutput);
    checker.rows("out", out.values(), out_, v_dim_);
    if (lse.view) checker.lse(lse.values(), lse_);
    checker.require(out.pads_untouched() && (!lse.view || lse.pads_untouched()),
                    "bytes between the rows of out or lse were written");
    return checker.result();
  }

 private:
  std::int64_t tokens_;
  std::int64_t heads_;
  std::int64_t v_dim_;
  std::vector<double> out_;
  std::vector<double> lse_;
};

inline std::vector<double> slice(const std::vector<double>& values, std::int64_t begin,
                                 std::int64_t end) {
  return {values.begin() + begin, values.begin() + end};
}

/// [T, N, A] and [T, N, B] to [T, N, A + B].
std::vector<double> join_rows(const std::vector<double>& a, std::int64_t a_width,
                              const std::vector<double>& b, std::int64_t b_width);

/// Standard deviation of the scores, as in trained models: with less, softmax is so even that a
/// kernel that mixes up keys still looks right.
inline constexpr double kScoreStddev = 4.0;

}  // namespace fovea::cases
