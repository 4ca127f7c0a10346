#include <algorithm>

#include "fovea/oracle.h"
#include "oracle/numerics.h"

namespace fovea::oracle {
namespace {

/// The letters of the formulas.
struct Dims {
  explicit Dims(const MlaWeights& w)
      : N(w.num_heads),
        L(w.kv_lora_rank),
        P(w.qk_nope_head_dim),
        R(w.qk_rope_head_dim),
        V(w.v_head_dim) {
    require(N > 0 && L > 0 && P > 0 && R > 0 && V > 0 && w.q_lora_rank >= 0 && w.hidden_size > 0,
            "num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim and "
            "hidden_size must be positive");
  }
  std::int64_t N, L, P, R, V;
};

/// Columns [begin, begin + width) of each row of x.
std::vector<double> columns(std::span<const double> x, std::int64_t row_width, std::int64_t begin,
                            std::int64_t width) {
  std::vector<double> out;
  out.reserve(x.size() / static_cast<std::size_t>(row_width) * static_cast<std::size_t>(width));
  for (auto row = x.begin(); row != x.end(); row += row_width) {
    out.insert(out.end(), row + begin, row + begin + width);
  }
  return out;
}

void put_columns(std::span<const double> x, std::int64_t width, std::span<double> out,
                 std::int64_t out_row_width, std::int64_t begin) {
  auto row = out.begin();
  for (auto source = x.begin(); source != x.end(); source += width, row += out_row_width) {
    std::copy(source, source + width, row + begin);
  }
}

/// rotate() on the rope columns of x [rows, heads, width], which are the last ones.
void rotate_last_columns(std::vector<double>& x, std::int64_t width, std::int64_t heads,
                         std::span<const std::int64_t> positions, const Rotary& rotary) {
  const auto rope_dim = 2 * static_cast<std::int64_t>(rotary.inv_freq.size());
  std::vector<double> rope_part = columns(x, width, width - rope_dim, rope_dim);
  rotate(rope_part, positions, heads, rotary);
  put_columns(rope_part, rope_dim, x, width, width - rope_dim);
}

std::vector<double> attention_expanded(const MlaWeights& w, const Dims& d,
                                       std::span<const double> queries,
                                       std::span<const double> latent_rows, bool causal) {
  const auto num_keys = static_cast<std::int64_t>(latent_rows.size()) / (d.L + d.R);
  const std::vector<double> kv_c = columns(latent_rows, d.L + d.R, 0, d.L);
  const std::vector<double> k_pe = columns(latent_rows, d.L + d.R, d.L, d.R);
  const std::vector<double> kv = linear(kv_c, w.kv_b_proj, {}, d.L);  // [keys, N, P + V]
  const std::vector<double> v = columns(kv, d.P + d.V, d.P, d.V);     // [keys, N, V]
  std::vector<double> k(static_cast<std::size_t>(num_keys * d.N * (d.P + d.R)));
  put_columns(columns(kv, d.P + d.V, 0, d.P), d.P, k, d.P + d.R, 0);
  for (std::int64_t j = 0; j < num_keys; ++j) {  // All heads share one rope key.
    for (std::int64_t n = 0; n < d.N; ++n) {
      std::copy_n(k_pe.begin() + j * d.R, d.R, k.begin() + (j * d.N + n) * (d.P + d.R) + d.P);
    }
  }
  return attention({.num_queries = static_cast<std::int64_t>(queries.size()) / (d.N * (d.P + d.R)),
                    .num_keys = num_keys,
                    .num_heads = d.N,
                    .num_kv_heads = d.N,
                    .qk_dim = d.P + d.R,
                    .v_dim = d.V,
                    .sm_scale = w.sm_scale,
                    .causal = causal,
                    .q = queries,
                    .k = k,
                    .v = v})
      .out;
}

/// q_nope W_UK on the query's side, W_UV on the output's side; keys and values are the rows.
std::vector<double> attention_absorbed(const MlaWeights& w, const Dims& d,
                                       std::span<const double> queries,
                                       std::span<const double> latent_rows, bool causal) {
  const auto num_queries = static_cast<std::int64_t>(queries.size()) / (d.N * (d.P + d.R));
  const std::int64_t row = d.L + d.R;
  // kv_b_proj is [N, P + V, L]: rows [n, 0..P) are W_UK of head n, rows [n, P..P + V) its W_UV.
  const auto weight_row = [&](std::int64_t n, std::int64_t i) {
    return w.kv_b_proj.data() + (n * (d.P + d.V) + i) * d.L;
  };
  std::vector<double> q(static_cast<std::size_t>(num_queries * d.N * row));  // [Q, N, L + R]
  for (std::int64_t n = 0; n < d.N; ++n) {
    for (std::int64_t i = 0; i < num_queries; ++i) {
      const double* source = queries.data() + (i * d.N + n) * (d.P + d.R);
      double* target = q.data() + (i * d.N + n) * row;
      for (std::int64_t p = 0; p < d.P; ++p) {
        add_scaled(target, source[p], weight_row(n, p), d.L);
      }
      std::copy_n(source + d.P, d.R, target + d.L);
    }
  }
  std::vector<double> latent(static_cast<std::size_t>(num_queries * d.N * d.L));
  std::vector<double> lse(static_cast<std::size_t>(num_queries * d.N));
  attend({.num_queries = num_queries,
          .num_keys = static_cast<std::int64_t>(latent_rows.size()) / row,
          .num_heads = d.N,
          .num_kv_heads = 1,
          .qk_dim = row,
          .v_dim = d.L,
          .sm_scale = w.sm_scale,
          .causal = causal,
          .q = q.data(),
          .k = latent_rows.data(),
          .k_row_stride = row,
          .v = latent_rows.data(),
          .v_row_stride = row},
         latent.data(), lse.data());
  std::vector<double> out(static_cast<std::size_t>(num_queries * d.N * d.V));
  for (std::int64_t i = 0; i < num_queries; ++i) {
    for (std::int64_t n = 0; n < d.N; ++n) {
      for (std::int64_t v = 0; v < d.V; ++v) {
        out[static_cast<std::size_t>((i * d.N + n) * d.V + v)] =
            dot(latent.data() + (i * d.N + n) * d.L, weight_row(n, d.P + v), d.L);
      }
    }
  }
  return out;
}

}  // namespace

std::vector<double> mla_latent_rows(const MlaWeights& w, std::span<const double> hidden,
                                    std::span<const std::int64_t> positions) {
  const Dims d(w);
  require_size("hidden", hidden, static_cast<std::int64_t>(positions.size()) * w.hidden_size);
  require_size("kv_a_proj", w.kv_a_proj, (d.L + d.R) * w.hidden_size);
  require_size("kv_a_layernorm", w.kv_a_layernorm, d.L);
  require_size("rotary.inv_freq", w.rotary.inv_freq, d.R / 2);
  std::vector<double> rows = linear(hidden, w.kv_a_proj, w.kv_a_bias, w.hidden_size);
  put_columns(rms_norm(columns(rows, d.L + d.R, 0, d.L), w.kv_a_layernorm, w.rms_norm_eps), d.L,
              rows, d.L + d.R, 0);
  rotate_last_columns(rows, d.L + d.R, 1, positions, w.rotary);
  return rows;
}

std::vector<double> mla_queries(const MlaWeights& w, std::span<const double> hidden,
                                std::span<const std::int64_t> positions) {
  const Dims d(w);
  require_size("hidden", hidden, static_cast<std::int64_t>(positions.size()) * w.hidden_size);
  require_size("rotary.inv_freq", w.rotary.inv_freq, d.R / 2);
  const std::int64_t in_features = w.q_lora_rank > 0 ? w.q_lora_rank : w.hidden_size;
  require_size("q_b_proj", w.q_b_proj, d.N * (d.P + d.R) * in_features);
  std::vector<double> q_c(hidden.begin(), hidden.end());
  if (w.q_lora_rank > 0) {
    require_size("q_a_proj", w.q_a_proj, w.q_lora_rank * w.hidden_size);
    require_size("q_a_layernorm", w.q_a_layernorm, w.q_lora_rank);
    q_c = rms_norm(linear(hidden, w.q_a_proj, w.q_a_bias, w.hidden_size), w.q_a_layernorm,
                   w.rms_norm_eps);
  }
  std::vector<double> q = linear(q_c, w.q_b_proj, {}, in_features);
  rotate_last_columns(q, d.P + d.R, d.N, positions, w.rotary);
  return q;
}

std::vector<double> mla_attention(const MlaWeights& w, std::span<const double> queries,
                                  std::span<const double> latent_rows, bool causal, MlaForm form) {
  const Dims d(w);
  const auto query_width = static_cast<std::size_t>(d.N * (d.P + d.R));
  const auto row_width = static_cast<std::size_t>(d.L + d.R);
  require(queries.size() % query_width == 0,
          "queries hold " + std::to_string(queries.size()) +
              " values, need rows of num_heads * (nope + rope) = " + std::to_string(query_width));
  require(latent_rows.size() % row_width == 0,
          "latent_rows hold " + std::to_string(latent_rows.size()) +
              " values, need rows of kv_lora_rank + rope = " + std::to_string(row_width));
  require_size("kv_b_proj", w.kv_b_proj, d.N * (d.P + d.V) * d.L);
  return form == MlaForm::expanded ? attention_expanded(w, d, queries, latent_rows, causal)
                                   : attention_absorbed(w, d, queries, latent_rows, causal);
}

std::vector<double> mla_layer(const MlaWeights& w, std::span<const double> hidden,
                              std::span<const std::int64_t> positions,
                              std::span<const double> latent_rows, MlaForm form) {
  require_size("o_proj", w.o_proj, w.hidden_size * w.num_heads * w.v_head_dim);
  const std::vector<double> queries = mla_queries(w, hidden, positions);
  const std::vector<double> out = mla_attention(w, queries, latent_rows, true, form);
  return linear(out, w.o_proj, w.o_bias, w.num_heads * w.v_head_dim);
}

}  // namespace fovea::oracle
