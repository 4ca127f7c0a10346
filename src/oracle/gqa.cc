#include <algorithm>

#include "fovea/oracle.h"
#include "oracle/numerics.h"

namespace fovea::oracle {
namespace {

void check_dims(const GqaWeights& w) {
  require(w.hidden_size > 0 && w.num_heads > 0 && w.num_kv_heads > 0 && w.head_dim > 0 &&
              w.v_head_dim > 0 && w.num_heads % w.num_kv_heads == 0,
          "hidden_size, num_heads, num_kv_heads, head_dim and v_head_dim must be positive, and "
          "num_heads a multiple of num_kv_heads");
}

/// Norm and rotation of x [rows, heads, head_dim], in the layer's order.
std::vector<double> normed_and_rotated(const GqaWeights& w, std::vector<double> x, const char* name,
                                       std::span<const double> norm,
                                       std::span<const std::int64_t> positions,
                                       std::int64_t heads) {
  const auto width = static_cast<std::int64_t>(norm.size());
  require(norm.empty() || width == w.head_dim || width == heads * w.head_dim,
          std::string(name) + " holds " + std::to_string(width) + " values, needs " +
              std::to_string(w.head_dim) + " or " + std::to_string(heads * w.head_dim));
  const auto turn = [&] {
    const std::size_t row_width = static_cast<std::size_t>(heads * w.head_dim);
    if (positions.size() == x.size() / row_width) {
      rotate(x, positions, heads, w.rotary, w.head_dim);
    } else {
      rotate_pairs(x, positions, heads, w.rotary, w.head_dim);
    }
  };
  if (w.norm_after_rope) turn();
  if (!norm.empty()) x = rms_norm(x, norm, w.rms_norm_eps);
  if (!w.norm_after_rope) turn();
  return x;
}

std::vector<double> projected(const GqaWeights& w, std::span<const double> hidden, const char* name,
                              std::span<const double> weight, std::span<const double> bias,
                              std::int64_t out_features) {
  check_dims(w);
  require_size(name, weight, out_features * w.hidden_size);
  return linear(hidden, weight, bias, w.hidden_size);
}

}  // namespace

std::vector<double> gqa_rows(const GqaWeights& w, std::span<const double> hidden,
                             std::span<const std::int64_t> positions) {
  const std::int64_t k_size = w.num_kv_heads * w.head_dim, v_size = w.num_kv_heads * w.v_head_dim;
  const std::vector<double> k =
      normed_and_rotated(w, projected(w, hidden, "k_proj", w.k_proj, w.k_bias, k_size), "k_norm",
                         w.k_norm, positions, w.num_kv_heads);
  const std::vector<double> v = projected(w, hidden, "v_proj", w.v_proj, w.v_bias, v_size);
  std::vector<double> rows;
  rows.reserve(k.size() + v.size());
  auto values = v.begin();
  for (auto keys = k.begin(); keys != k.end(); keys += k_size, values += v_size) {
    rows.insert(rows.end(), keys, keys + k_size);
    rows.insert(rows.end(), values, values + v_size);
  }
  return rows;
}

std::vector<double> gqa_queries(const GqaWeights& w, std::span<const double> hidden,
                                std::span<const std::int64_t> positions) {
  return normed_and_rotated(
      w, projected(w, hidden, "q_proj", w.q_proj, w.q_bias, w.num_heads * w.head_dim), "q_norm",
      w.q_norm, positions, w.num_heads);
}

std::vector<double> gqa_attention(const GqaWeights& w, std::span<const double> queries,
                                  std::span<const double> rows) {
  check_dims(w);
  const std::int64_t query_width = w.num_heads * w.head_dim;
  const std::int64_t row_width = w.num_kv_heads * (w.head_dim + w.v_head_dim);
  const auto num_queries = static_cast<std::int64_t>(queries.size()) / query_width;
  const auto num_keys = static_cast<std::int64_t>(rows.size()) / row_width;
  require_size("queries", queries, num_queries * query_width);
  require_size("rows", rows, num_keys * row_width);
  if (!w.sinks.empty()) require_size("sinks", w.sinks, w.num_heads);
  std::vector<double> out(static_cast<std::size_t>(num_queries * w.num_heads * w.v_head_dim));
  std::vector<double> lse(static_cast<std::size_t>(num_queries * w.num_heads));
  attend({.num_queries = num_queries,
          .num_keys = num_keys,
          .num_heads = w.num_heads,
          .num_kv_heads = w.num_kv_heads,
          .qk_dim = w.head_dim,
          .v_dim = w.v_head_dim,
          .sm_scale = w.sm_scale,
          .causal = true,
          .window_left = w.window_left,
          .attention_chunk = w.attention_chunk,
          .soft_cap = w.soft_cap,
          .sinks = w.sinks,
          .q = queries.data(),
          .k = rows.data(),
          .k_row_stride = row_width,
          .v = rows.data() + w.num_kv_heads * w.head_dim,
          .v_row_stride = row_width},
         out.data(), lse.data());
  return out;
}

std::vector<double> gqa_layer(const GqaWeights& w, std::span<const double> hidden,
                              std::span<const std::int64_t> positions,
                              std::span<const double> rows) {
  require_size("o_proj", w.o_proj, w.hidden_size * w.num_heads * w.v_head_dim);
  const std::vector<double> out = gqa_attention(w, gqa_queries(w, hidden, positions), rows);
  return linear(out, w.o_proj, w.o_bias, w.num_heads * w.v_head_dim);
}

}  // namespace fovea::oracle
