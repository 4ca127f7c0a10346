// Operands of cases: seeded values, NaN wherever nobody owns the bytes. They are in
// OpContext::host_memory, which the host and the device address alike.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cases/problem.h"
#include "fovea/ops.h"
#include "fovea/paged_kv_cache.h"
#include "fovea/tensor.h"

namespace fovea::cases {

/// Small and fast (splitmix64, Steele et al. 2014), and the same everywhere, which
/// std::normal_distribution is not.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits();
  /// From `min` to `max`, both included.
  std::int64_t integer(std::int64_t min, std::int64_t max);
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double normal();
  bool chance(double probability) { return uniform() < probability; }

 private:
  std::uint64_t state_;
};

/// Values with `pad` unowned elements after each innermost row.
struct Array {
  Tensor storage;
  TensorView view;

  /// Row-major, without the pads.
  std::vector<double> values() const;
  bool pads_untouched() const;
};

struct ArraySpec {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::int64_t pad = 0;
};
/// Every byte 0xff: a NaN in f32, f16 and bf16.
Array poisoned_array(const OpContext& ctx, const ArraySpec& spec);
Array normal_array(const OpContext& ctx, const ArraySpec& spec, Random& random,
                   double stddev = 1.0);
/// i64 [values]
Tensor index_array(const OpContext& ctx, const std::vector<std::int64_t>& values);

/// Reserves `bytes` of scratch and fills all of it with NaN.
void reserve_poisoned(const OpContext& ctx, std::int64_t bytes);

/// Sequences in a paged cache: blocks in random order, NaN in every slot not in use, garbage ids in
/// the block table's tails.
struct CachedSequences {
  PagedKvCache cache;
  std::vector<std::int32_t> block_ids;  ///< [requests, width]
  std::int64_t width = 0;
  std::vector<std::int64_t> lens;
  std::vector<std::int64_t> hidden;  ///< [requests] so many first tokens that nobody stored.

  BlockTableView table() const;
  std::int64_t slot(std::size_t request, std::int64_t position) const;
  /// Tokens before `position` are none of the sequence's: garbage ids where whole blocks are.
  void hide_before(std::size_t request, std::int64_t position);
  /// Row-major rows [begin, end) of a sequence, NaN where hidden.
  std::vector<double> rows(std::size_t request, std::int64_t begin, std::int64_t end) const;
  /// Rows [begins[i], ends[i]) of each request i.
  void fill(const OpContext& ctx, std::span<const std::int64_t> begins,
            std::span<const std::int64_t> ends, Random& random) const;
  /// The same sequences and blocks with rows of another format in a cache of their own; poisoned.
  CachedSequences beside(const KvFormat& format, std::int64_t pad,
                         const OpContext& ctx) const;
};
struct CacheSpec {
  KvFormat format;
  std::int64_t block_size = 64;
  std::int64_t pad = 0;  ///< Unowned elements after each row.
};
/// Poisoned; fill() what should be there.
CachedSequences make_cached_sequences(const OpContext& ctx, const CacheSpec& spec,
                                      std::vector<std::int64_t> lens, Random& random);

/// Values are about 1: attention outputs below a fiftieth of that are what cancellation left.
inline constexpr double kSmallOutput = 0.02;

/// Collects the worst row.
class RowChecker {
 public:
  /// Rows are compared relative to their norm. `small`: elements that small are no smaller than
  /// what rounding leaves of larger ones that cancelled, or that a sink took the weight of: a row's
  /// norm counts as that of `small` in every element at least.
  explicit RowChecker(double limit, double small = 0) : small_(small) { result_.limit = limit; }
  void rows(const std::string& name, std::span<const double> got, std::span<const double> expected,
            std::int64_t row_elements);
  /// One by one: -inf exactly, else relative to max(1, |expected|).
  void lse(std::span<const double> got, std::span<const double> expected);
  void require(bool holds, const std::string& what);
  const CheckResult& result() const { return result_; }

 private:
  void note(double error, std::string place);
  double small_;
  CheckResult result_;
};

/// What one rounding to `dtype` makes of a row at most, against its norm.
double rounding(DType dtype);
/// Of an op that computes in f32 and rounds its result once.
double row_limit(DType dtype);
/// Of attention, which may round weights to `dtype` too: the limits of `fovea run --verify`.
double attention_limit(DType dtype);

std::vector<std::int32_t> to_int32(const std::vector<std::int64_t>& values);
/// [0, a, a + b, ...]
std::vector<std::int32_t> running_sum(const std::vector<std::int64_t>& lengths);

}  // namespace fovea::cases
