// The MLA layer's oracle under a window, chunk, soft cap, sinks and draft tree: heads expanded,
// then dense attention.
#pragma once

#include <cstdint>
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

}  // namespace fovea::test
