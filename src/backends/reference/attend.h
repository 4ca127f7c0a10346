// Softmax attention of one query row: the formula that every attention op shares.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "variants/visibility.h"

namespace fovea::reference {

inline constexpr double kEmptyLse = -std::numeric_limits<double>::infinity();
/// A sink of no weight.
inline constexpr double kNoSink = -std::numeric_limits<double>::infinity();

/// Scratch of attend(), in doubles.
struct AttendScratch {
  double* scores;  ///< [keys]
  double* row;     ///< [max(qk_dim, v_dim)]
};

/// A query row [qk_dim] with the keys that it may see, of which `sees(key)` has the last word.
struct QueryRow {
  const double* q;
  std::int64_t qk_dim;
  std::int64_t v_dim;
  KeyInterval keys;
  double sm_scale;
  double soft_cap;  ///< 0: none.
  double sink;      ///< kNoSink: none.
};

/// With s_j = sm_scale q k_j, soft-capped: out [v_dim] = sum_j exp(s_j) v_j / (sum_j exp(s_j) +
/// exp(sink)); returns lse = log sum_j exp(s_j). (0, -inf) without keys. Hidden keys are not even
/// read. load_key and load_value give row `key`.
template <class Sees, class LoadKey, class LoadValue>
double attend(const QueryRow& query, const Sees& sees, const LoadKey& load_key,
              const LoadValue& load_value, const AttendScratch& scratch, double* out) {
  for (std::int64_t d = 0; d < query.v_dim; ++d) out[d] = 0;

  const auto [begin, end] = query.keys;
  double max = kEmptyLse;
  bool has_nan = false;
  for (std::int64_t key = begin; key < end; ++key) {
    if (!sees(key)) continue;
    load_key(key, scratch.row);
    double score = 0;
    for (std::int64_t d = 0; d < query.qk_dim; ++d) score += query.q[d] * scratch.row[d];
    score *= query.sm_scale;
    if (query.soft_cap > 0) score = query.soft_cap * std::tanh(score / query.soft_cap);
    scratch.scores[key - begin] = score;
    max = std::fmax(max, score);
    has_nan = has_nan || std::isnan(score);
  }
  // No key, or none with any weight.
  if (max == kEmptyLse && !has_nan) return kEmptyLse;

  double sum = 0;
  for (std::int64_t key = begin; key < end; ++key) {
    if (!sees(key)) continue;
    const double weight = std::exp(scratch.scores[key - begin] - max);
    sum += weight;
    load_value(key, scratch.row);
    for (std::int64_t d = 0; d < query.v_dim; ++d) out[d] += weight * scratch.row[d];
  }
  const double denominator = sum + std::exp(query.sink - max);
  for (std::int64_t d = 0; d < query.v_dim; ++d) out[d] /= denominator;
  return max + std::log(sum);
}

}  // namespace fovea::reference
