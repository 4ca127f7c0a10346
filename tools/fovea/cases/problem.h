// One op on seeded operands: what is timed, and what is checked against the float64 oracle.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cases/case_line.h"
#include "fovea/op_context.h"

namespace fovea::cases {

/// What has to be done, however it is done: only visible keys, each operand once.
struct Work {
  double flops = 0;
  double bytes = 0;
};

/// The worst row of what a run wrote, against float64.
struct CheckResult {
  double worst_error = 0;  ///< Of the row's norm; infinite where NaN came out.
  double limit = 0;
  std::string worst_place;  ///< "out row 12: got 0.125, expected 0.25".
  bool passed() const { return worst_error <= limit; }
};

/// Unowned bytes (slots not in use, padding, scratch) hold NaN, and ids nobody may read are
/// garbage.
class Problem {
 public:
  virtual ~Problem() = default;
  /// Once, where the plan shall be brought to the device before run() rather than by it.
  virtual void prepare() {}
  /// One call of the op. The plan is made, and scratch reserved, on construction.
  virtual void run() = 0;
  virtual Work work() const = 0;
  /// Of the last run.
  virtual CheckResult check() const = 0;
};

/// Borrows `ctx`. Throws Error(invalid_argument) that names what is wrong with the line.
std::unique_ptr<Problem> make_problem(const CaseLine& line, const OpContext& ctx);

/// Every op that make_problem knows.
const std::vector<std::string>& case_ops();

/// A small case of `op`, seldom twice the same.
CaseLine random_case(const std::string& op, DType dtype, std::uint64_t seed);

}  // namespace fovea::cases
