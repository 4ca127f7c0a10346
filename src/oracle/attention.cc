#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "fovea/oracle.h"
#include "oracle/numerics.h"

namespace fovea::oracle {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

/// Position of query i in its sequence; a draft's counts its ancestors, whatever row it has.
std::int64_t query_position(const StridedAttention& a, std::int64_t i) {
  const std::int64_t context = a.num_keys - a.num_queries;
  if (a.draft_tree.empty()) return context + i;
  return context + std::popcount(a.draft_tree[static_cast<std::size_t>(i)]) - 1;
}

bool sees(const StridedAttention& a, std::int64_t i, std::int64_t j) {
  const std::int64_t context = a.num_keys - a.num_queries;
  const bool is_draft = !a.draft_tree.empty() && j >= context;
  const std::int64_t position = query_position(a, i);
  const std::int64_t key_position = is_draft ? query_position(a, j - context) : j;
  if (is_draft && (a.draft_tree[static_cast<std::size_t>(i)] >> (j - context) & 1) == 0) {
    return false;
  }
  if (a.causal && key_position > position) return false;
  const std::int64_t window_end = a.window_from_row ? i : position;
  if (a.window_left >= 0 && key_position < window_end - a.window_left) return false;
  return a.attention_chunk == 0 || key_position / a.attention_chunk == position / a.attention_chunk;
}

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

/// Of a denominator exp(lse) + exp(sink), the part that is not the sink's.
double share_beside_sink(double lse, std::span<const double> sinks, std::int64_t head) {
  return sinks.empty() ? 1 : 1 / (1 + std::exp(sinks[static_cast<std::size_t>(head)] - lse));
}

void check_rules(const Attention& p) {
  require(p.attention_chunk >= 0 && (p.attention_chunk == 0 || p.causal),
          "attention_chunk " + std::to_string(p.attention_chunk) +
              " must not be negative, and 0 unless causal");
  require(p.soft_cap >= 0, "soft_cap " + std::to_string(p.soft_cap) + " must not be negative");
  if (!p.sinks.empty()) require_size("sinks", p.sinks, p.num_heads);
  if (p.draft_tree.empty()) return;
  require(static_cast<std::int64_t>(p.draft_tree.size()) == p.num_queries,
          "draft_tree holds " + std::to_string(p.draft_tree.size()) + " values, needs " +
              std::to_string(p.num_queries));
  require(p.causal && p.num_queries <= 64 && p.num_queries <= p.num_keys,
          "a draft_tree is causal and has at most 64 queries, and no more than keys");
}

}  // namespace

void attend(const StridedAttention& a, double* out, double* lse) {
  const std::int64_t group = a.num_heads / a.num_kv_heads;
  std::vector<std::int64_t> keys;
  std::vector<double> weights;  // [num_heads, keys]
  for (std::int64_t i = 0; i < a.num_queries; ++i) {
    keys.clear();
    for (std::int64_t j = 0; j < a.num_keys; ++j) {
      if (sees(a, i, j)) keys.push_back(j);
    }
    const auto visible = static_cast<std::int64_t>(keys.size());
    const double* q = a.q + i * a.num_heads * a.qk_dim;
    double* o = out + i * a.num_heads * a.v_dim;
    if (visible == 0) {
      for (std::int64_t h = 0; h < a.num_heads; ++h) lse[h * a.num_queries + i] = kNegativeInfinity;
      continue;
    }
    weights.resize(static_cast<std::size_t>(a.num_heads * visible));
    for (std::int64_t n = 0; n < visible; ++n) {
      const double* row = a.k + keys[static_cast<std::size_t>(n)] * a.k_row_stride;
      for (std::int64_t h = 0; h < a.num_heads; ++h) {
        const double score =
            a.sm_scale * dot(q + h * a.qk_dim, row + h / group * a.qk_dim, a.qk_dim);
        weights[static_cast<std::size_t>(h * visible + n)] =
            a.soft_cap > 0 ? a.soft_cap * std::tanh(score / a.soft_cap) : score;
      }
    }
    for (std::int64_t h = 0; h < a.num_heads; ++h) {
      double* of_head = weights.data() + h * visible;
      double& row_lse = lse[h * a.num_queries + i];
      row_lse = softmax(of_head, visible);
      const double share = share_beside_sink(row_lse, a.sinks, h);
      for (std::int64_t n = 0; n < visible; ++n) of_head[n] *= share;
    }
    for (std::int64_t n = 0; n < visible; ++n) {
      const double* row = a.v + keys[static_cast<std::size_t>(n)] * a.v_row_stride;
      for (std::int64_t h = 0; h < a.num_heads; ++h) {
        add_scaled(o + h * a.v_dim, weights[static_cast<std::size_t>(h * visible + n)],
                   row + h / group * a.v_dim, a.v_dim);
      }
    }
  }
}

AttentionResult attention(const Attention& p) {
  require(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0,
          "num_heads " + std::to_string(p.num_heads) + " is no multiple of num_kv_heads " +
              std::to_string(p.num_kv_heads));
  check_rules(p);
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
          .window_left = p.window_left,
          .window_from_row = p.window_from_row,
          .attention_chunk = p.attention_chunk,
          .soft_cap = p.soft_cap,
          .sinks = p.sinks,
          .draft_tree = p.draft_tree,
          .q = p.q.data(),
          .k = p.k.data(),
          .k_row_stride = p.num_kv_heads * p.qk_dim,
          .v = p.v.data(),
          .v_row_stride = p.num_kv_heads * p.v_dim},
         result.out.data(), result.lse.data());
  return result;
}

AttentionResult merge(const AttentionResult& a, const AttentionResult& b, std::int64_t num_heads,
                      std::int64_t num_queries, std::int64_t v_dim, std::span<const double> sinks) {
  if (!sinks.empty()) require_size("sinks", sinks, num_heads);
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
      const double share = share_beside_sink(result.lse[row], sinks, h);
      double* out = result.out.data() + (i * num_heads + h) * v_dim;
      for (const AttentionResult* part : {&a, &b}) {
        const double weight = share * std::exp(part->lse[row] - largest) / sum;
        const double* part_out = part->out.data() + (i * num_heads + h) * v_dim;
        if (weight != 0) add_scaled(out, weight, part_out, v_dim);
      }
    }
  }
  return result;
}

}  // namespace fovea::oracle
