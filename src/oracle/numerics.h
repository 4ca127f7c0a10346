// What every formula here is made of.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace fovea::oracle {

/// Throws std::invalid_argument unless `values` holds `expected` of them.
inline void require_size(const char* name, std::span<const double> values, std::int64_t expected) {
  if (static_cast<std::int64_t>(values.size()) != expected) {
    throw std::invalid_argument(std::string(name) + " holds " + std::to_string(values.size()) +
                                " values, needs " + std::to_string(expected));
  }
}

inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

/// Sum of a[i] * b[i]. Eight running sums: one alone would wait for each addition in turn.
inline double dot(const double* a, const double* b, std::int64_t n) {
  double sums[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// y += a * x.
inline void add_scaled(double* __restrict y, double a, const double* __restrict x, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int lane = 0; lane < 8; ++lane) y[i + lane] += a * x[i + lane];
  }
  for (; i < n; ++i) y[i] += a * x[i];
}

/// Attention over rows that may lie inside wider rows: key head h of key j starts at
/// k + j * k_row_stride + h * qk_dim, its values at v + j * v_row_stride + h * v_dim. The other
/// fields are those of Attention.
struct StridedAttention {
  std::int64_t num_queries, num_keys, num_heads, num_kv_heads, qk_dim, v_dim;
  double sm_scale;
  bool causal;
  std::int64_t window_left = -1;
  bool window_from_row = false;
  std::int64_t attention_chunk = 0;
  double soft_cap = 0;
  std::span<const double> sinks = {};
  std::span<const std::uint64_t> draft_tree = {};
  const double* q;  ///< [num_queries, num_heads, qk_dim]
  const double* k;
  std::int64_t k_row_stride;
  const double* v;
  std::int64_t v_row_stride;
};
/// out [num_queries, num_heads, v_dim] and lse [num_heads, num_queries], both set by the caller to
/// 0.
void attend(const StridedAttention& problem, double* out, double* lse);

}  // namespace fovea::oracle
