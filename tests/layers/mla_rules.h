// The MLA layer's oracle under a window, chunk, soft cap, sinks and draft tree: heads expanded,
// then dense attention. And with quantised queries.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "fovea/attention_variant.h"
#include "fovea/oracle.h"

namespace fovea::test {

struct MlaRules {
  AttentionVariant variant;
  std::vector<double> sinks;              ///< [heads] or empty.
  std::vector<std::uint64_t> draft_tree;  ///< As oracle::Attention has it.
};

/// As oracle::mla_layer.
inline std::vector<double> mla_layer_by_rules(const oracle::MlaWeights& w, const MlaRules& rules,
                                              std::span<const double> hidden,
                                              std::span<const std::int64_t> positions,
                                              const std::vector<double>& latent_rows) {
  const std::int64_t N = w.num_heads, L = w.kv_lora_rank, P = w.qk_nope_head_dim,
                     R = w.qk_rope_head_dim, V = w.v_head_dim;
  const auto keys = static_cast<std::int64_t>(latent_rows.size()) / (L + R);
  std::vector<double> k, v;  // [keys, N, P + R] and [keys, N, V]
  for (std::int64_t i = 0; i < keys; ++i) {
    const auto latent = latent_rows.begin() + i * (L + R);
    const std::vector<double> expanded =
        oracle::linear(std::vector<double>(latent, latent + L), w.kv_b_proj, {}, L);
    for (std::int64_t n = 0; n < N; ++n) {
      const auto head = expanded.begin() + n * (P + V);
      k.insert(k.end(), head, head + P);
      k.insert(k.end(), latent + L, latent + L + R);
      v.insert(v.end(), head + P, head + P + V);
    }
  }
  const std::vector<double> q = oracle::mla_queries(w, hidden, positions);
  const oracle::AttentionResult attended =
      oracle::attention({.num_queries = static_cast<std::int64_t>(positions.size()),
                         .num_keys = keys,
                         .num_heads = N,
                         .num_kv_heads = N,
                         .qk_dim = P + R,
                         .v_dim = V,
                         .sm_scale = w.sm_scale,
                         .causal = true,
                         .window_left = rules.variant.window_left,
                         .attention_chunk = rules.variant.attention_chunk,
                         .soft_cap = rules.variant.soft_cap,
                         .sinks = rules.sinks,
                         .draft_tree = rules.draft_tree,
                         .q = q,
                         .k = k,
                         .v = v});
  return oracle::linear(attended.out, w.o_proj, w.o_bias, N * V);
}

/// The f8e4m3fn value nearest to x, ties to the even code; beyond the largest that one.
inline double nearest_e4m3(double x) {
  static const std::vector<double> values = [] {
    std::vector<std::uint8_t> codes(127);  // 0 to 448, in order.
    std::iota(codes.begin(), codes.end(), std::uint8_t{0});
    return oracle::decode(codes.data(), 127, oracle::Format::f8e4m3fn);
  }();
  const double magnitude = std::min(std::abs(x), values.back());
  const auto above = static_cast<std::size_t>(
      std::lower_bound(values.begin(), values.end(), magnitude) - values.begin());
  std::size_t code = above;
  if (above > 0) {
    const double down = magnitude - values[above - 1], up = values[above] - magnitude;
    if (down < up || (down == up && above % 2 == 1)) code = above - 1;
  }
  return std::copysign(values[code], x);
}

/// As oracle::mla_layer in its absorbed form, with queries [latent | rope] in FP8 under one scale.
inline std::vector<double> mla_layer_with_fp8_queries(const oracle::MlaWeights& w, double q_scale,
                                                      std::span<const double> hidden,
                                                      std::span<const std::int64_t> positions,
                                                      const std::vector<double>& latent_rows) {
  const std::int64_t N = w.num_heads, L = w.kv_lora_rank, P = w.qk_nope_head_dim,
                     R = w.qk_rope_head_dim, V = w.v_head_dim;
  const auto tokens = static_cast<std::int64_t>(positions.size());
  const auto keys = static_cast<std::int64_t>(latent_rows.size()) / (L + R);
  const auto w_kv_b = [&](std::int64_t row, std::int64_t l) {
    return w.kv_b_proj[static_cast<std::size_t>(row * L + l)];
  };
  const std::vector<double> queries = oracle::mla_queries(w, hidden, positions);
  std::vector<double> q;  // [tokens, N, L + R]
  for (std::int64_t row = 0; row < tokens * N; ++row) {
    const auto head = queries.begin() + row * (P + R);
    for (std::int64_t l = 0; l < L; ++l) {
      double sum = 0;
      for (std::int64_t p = 0; p < P; ++p) sum += head[p] * w_kv_b(row % N * (P + V) + p, l);
      q.push_back(sum);
    }
    q.insert(q.end(), head + P, head + P + R);
  }
  for (double& x : q) x = nearest_e4m3(x / q_scale) * q_scale;
  std::vector<double> v;  // [keys, L]
  for (std::int64_t i = 0; i < keys; ++i) {
    const auto row = latent_rows.begin() + i * (L + R);
    v.insert(v.end(), row, row + L);
  }
  const oracle::AttentionResult attended = oracle::attention({.num_queries = tokens,
                                                              .num_keys = keys,
                                                              .num_heads = N,
                                                              .num_kv_heads = 1,
                                                              .qk_dim = L + R,
                                                              .v_dim = L,
                                                              .sm_scale = w.sm_scale,
                                                              .q = q,
                                                              .k = latent_rows,
                                                              .v = v});
  std::vector<double> heads;  // [tokens, N, V]
  for (std::int64_t row = 0; row < tokens * N; ++row) {
    for (std::int64_t i = 0; i < V; ++i) {
      double sum = 0;
      for (std::int64_t l = 0; l < L; ++l) {
        sum += attended.out[static_cast<std::size_t>(row * L + l)] *
               w_kv_b(row % N * (P + V) + P + i, l);
      }
      heads.push_back(sum);
    }
  }
  return oracle::linear(heads, w.o_proj, w.o_bias, N * V);
}

}  // namespace fovea::test
