#include <algorithm>
#include <cmath>
#include <limits>

#include "fovea/oracle.h"
#include "oracle/numerics.h"

namespace fovea::oracle {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

/// Turns scores into softmax weights; returns their lse.
double softmax(double* scores, std::int64_t n) {
  double largest = kNegativeInfinity;
  for (std::int64_t j = 0; j < n; ++j) largest = std::max(largest, scores[j]);
  double sum = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    scores[j] = std::exp(scores[j] - largest);
    sum += scores[j];
  }
  for (std::int64_t j = 0; j < n; ++j) scores[j] /= sum;
  return largest + std::log(sum);
}

}  // namespace

void attend(const StridedAttention& a, double* out, double* lse) {
  const std::int64_t group = a.num_heads / a.num_kv_heads;
  std::vector<double> weights;  // [num_heads, visible]
  for (std::int64_t i = 0; i < a.num_queries; ++i) {
    const std::int64_t position = a.num_keys - a.num_queries + i;
    const std::int64_t visible = a.causal ? std::max<std::int64_t>(position + 1, 0) : a.num_keys;
    const double* q = a.q + i * a.num_heads * a.qk_dim;
    double* o = out + i * a.num_heads * a.v_dim;
    if (visible == 0) {
      for (std::int64_t h = 0; h < a.num_heads; ++h) lse[h * a.num_queries + i] = kNegativeInfinity;
      continue;
    }
    weights.resize(static_cast<std::size_t>(a.num_heads * visible));
    for (std::int64_t j = 0; j < visible; ++j) {
      for (std::int64_t h = 0; h < a.num_heads; ++h) {
        const double* k = a.k + j * a.k_row_stride + h / group * a.qk_dim;
        weights[static_cast<std::size_t>(h * visible + j)] =
            a.sm_scale * dot(q + h * a.qk_dim, k, a.qk_dim);
      }
    }
    for (std::int64_t h = 0; h < a.num_heads; ++h) {
      lse[h * a.num_queries + i] = softmax(weights.data() + h * visible, visible);
    }
    for (std::int64_t j = 0; j < visible; ++j) {
      for (std::int64_t h = 0; h < a.num_heads; ++h) {
        const double* v = a.v + j * a.v_row_stride + h / group * a.v_dim;
        add_scaled(o + h * a.v_dim, weights[static_cast<std::size_t>(h * visible + j)], v, a.v_dim);
      }
    }
  }
}

AttentionResult attention(const Attention& p) {
  require(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0,
          "num_heads " + std::to_string(p.num_heads) + " is no multiple of num_kv_heads " +
              std::to_string(p.num_kv_heads));
  require_size("q", p.q, p.num_queries * p.num_heads * p.qk_dim);
  require_size("k", p.k, p.num_keys * p.num_kv_heads * p.qk_dim);
  require_size("v", p.v, p.num_keys * p.num_kv_heads * p.v_dim);
  AttentionResult result;
  result.out.resize(static_cast<std::size_t>(p.num_queries * p.num_heads * p.v_dim));
  result.lse.resize(static_cast<std::size_t>(p.num_heads * p.num_queries));
  attend({.num_queries = p.num_queries,
          .num_keys = p.num_keys,
          .num_heads = p.num_heads,
          .num_kv_heads = p.num_kv_heads,
          .qk_dim = p.qk_dim,
          .v_dim = p.v_dim,
          .sm_scale = p.sm_scale,
          .causal = p.causal,
          .q = p.q.data(),
          .k = p.k.data(),
          .k_row_stride = p.num_kv_heads * p.qk_dim,
          .v = p.v.data(),
          .v_row_stride = p.num_kv_heads * p.v_dim},
         result.out.data(), result.lse.data());
  return result;
}

AttentionResult merge(const AttentionResult& a, const AttentionResult& b, std::int64_t num_heads,
                      std::int64_t num_queries, std::int64_t v_dim) {
  for (const AttentionResult* part : {&a, &b}) {
    require_size("out", part->out, num_queries * num_heads * v_dim);
    require_size("lse", part->lse, num_heads * num_queries);
  }
  AttentionResult result;
  result.out.assign(a.out.size(), 0.0);
  result.lse.assign(a.lse.size(), kNegativeInfinity);
  for (std::int64_t h = 0; h < num_heads; ++h) {
    for (std::int64_t i = 0; i < num_queries; ++i) {
      const auto row = static_cast<std::size_t>(h * num_queries + i);
      const double largest = std::max(a.lse[row], b.lse[row]);
      if (largest == kNegativeInfinity) continue;
      // An lse is the log of the sum of exponentials: the parts' sums just add.
      const double sum = std::exp(a.lse[row] - largest) + std::exp(b.lse[row] - largest);
      result.lse[row] = largest + std::log(sum);
      double* out = result.out.data() + (i * num_heads + h) * v_dim;
      for (const AttentionResult* part : {&a, &b}) {
        const double weight = std::exp(part->lse[row] - largest) / sum;
        const double* part_out = part->out.data() + (i * num_heads + h) * v_dim;
        if (weight != 0) add_scaled(out, weight, part_out, v_dim);
      }
    }
  }
  return result;
}

}  // namespace fovea::oracle
