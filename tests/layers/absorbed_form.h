// The MLA layer's oracle as decode computes it: queries in the latent space, with what products and
// kernels in FP8 or FP4 round.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "fovea/mla.h"
#include "fovea/oracle.h"

namespace fovea::test {

/// Of ascending magnitudes from 0 on the one nearest to |x|, ties to the even one; signed as x.
inline double nearest(double x, const std::vector<double>& magnitudes) {
  const double magnitude = std::min(std::abs(x), magnitudes.back());
  const auto above = static_cast<std::size_t>(
      std::lower_bound(magnitudes.begin(), magnitudes.end(), magnitude) - magnitudes.begin());
  std::size_t code = above;
  if (above > 0) {
    const double down = magnitude - magnitudes[above - 1], up = magnitudes[above] - magnitude;
    if (down < up || (down == up && above % 2 == 1)) code = above - 1;
  }
  return std::copysign(magnitudes[code], x);
}
inline double nearest_e4m3(double x) {
  static const std::vector<double> magnitudes = [] {
    std::vector<std::uint8_t> codes(127);  // 0 to 448, in order.
    std::iota(codes.begin(), codes.end(), std::uint8_t{0});
    return oracle::decode(codes.data(), 127, oracle::Format::f8e4m3fn);
  }();
  return nearest(x, magnitudes);
}
inline double nearest_e2m1(double x) {
  static const std::vector<double> magnitudes{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return nearest(x, magnitudes);
}

/// Values at `indices` of `values` to FP8, or to FP4 under a power of two, in one group.
inline void round_group(AbsorbedProducts products, std::span<const std::size_t> indices,
                        std::vector<double>& values) {
  double amax = 1e-30;
  for (const std::size_t i : indices) amax = std::max(amax, std::abs(values[i]));
  const bool is_mxfp4 = products == AbsorbedProducts::mxfp4;
  const double scale = is_mxfp4 ? std::exp2(std::floor(std::log2(amax / 7)) + 1) : amax / 448;
  for (const std::size_t i : indices) {
    const double code = values[i] / scale;
    values[i] = scale * (is_mxfp4 ? nearest_e2m1(code) : nearest_e4m3(code));
  }
}

/// What decode rounds on the way.
struct AbsorbedForm {
  double q_scale = 0;              ///< Above 0: queries [latent | rope] to FP8 under this scale.
  std::vector<double> kv_b_proj;   ///< W_UK and W_UV as rounded.
  std::int64_t q_nope_group = 0;   ///< Above 0: inputs of W_UK to FP8 in groups of so many.
  std::int64_t latent_group = 0;   ///< The same of W_UV.
};

/// `blocks`: of an FP8 kv_b_proj.
inline AbsorbedForm absorbed_form(const oracle::MlaWeights& w, AbsorbedProducts products,
                                  const WeightGroups& blocks) {
  AbsorbedForm form{.kv_b_proj = w.kv_b_proj};
  if (products == AbsorbedProducts::dense) return form;
  const std::int64_t N = w.num_heads, L = w.kv_lora_rank, P = w.qk_nope_head_dim, V = w.v_head_dim;
  if (products == AbsorbedProducts::fp8_blocks) {
    form.q_nope_group = blocks.out;
    form.latent_group = blocks.in;
    return form;
  }
  const auto index = [&](std::int64_t n, std::int64_t row, std::int64_t l) {
    return static_cast<std::size_t>((n * (P + V) + row) * L + l);
  };
  std::vector<std::size_t> keys, values;  // Of all heads, input channels last.
  for (std::int64_t n = 0; n < N; ++n) {
    for (std::int64_t l = 0; l < L; ++l) {
      for (std::int64_t p = 0; p < P; ++p) keys.push_back(index(n, p, l));
    }
    for (std::int64_t i = 0; i < V; ++i) {
      for (std::int64_t l = 0; l < L; ++l) values.push_back(index(n, P + i, l));
    }
  }
  for (const std::vector<std::size_t>& part : {keys, values}) {
    const std::size_t group = products == AbsorbedProducts::mxfp4 ? 32 : part.size();
    for (std::size_t i = 0; i < part.size(); i += group) {
      round_group(products, std::span(part).subspan(i, group), form.kv_b_proj);
    }
  }
  if (products == AbsorbedProducts::fp8) {
    form.q_nope_group = P;
    form.latent_group = L;
  }
  return form;
}

/// `count` values from `begin` on to FP8, in groups.
inline void round_inputs(std::vector<double>& values, std::int64_t begin, std::int64_t count,
                         std::int64_t group) {
  if (group == 0) return;
  for (std::int64_t first = begin; first < begin + count; first += group) {
    std::vector<std::size_t> indices(static_cast<std::size_t>(group));
    std::iota(indices.begin(), indices.end(), static_cast<std::size_t>(first));
    round_group(AbsorbedProducts::fp8, indices, values);
  }
}

/// As oracle::mla_layer in its absorbed form.
inline std::vector<double> mla_layer_absorbed(const oracle::MlaWeights& w, const AbsorbedForm& form,
                                              std::span<const double> hidden,
                                              std::span<const std::int64_t> positions,
                                              const std::vector<double>& latent_rows) {
  const std::int64_t N = w.num_heads, L = w.kv_lora_rank, P = w.qk_nope_head_dim,
                     R = w.qk_rope_head_dim, V = w.v_head_dim;
  const auto tokens = static_cast<std::int64_t>(positions.size());
  const auto keys = static_cast<std::int64_t>(latent_rows.size()) / (L + R);
  const auto w_kv_b = [&](std::int64_t row, std::int64_t l) {
    return form.kv_b_proj[static_cast<std::size_t>(row * L + l)];
  };
  std::vector<double> queries = oracle::mla_queries(w, hidden, positions);
  std::vector<double> q;  // [tokens, N, L + R]
  for (std::int64_t row = 0; row < tokens * N; ++row) {
    round_inputs(queries, row * (P + R), P, form.q_nope_group);
    const auto head = queries.begin() + row * (P + R);
    for (std::int64_t l = 0; l < L; ++l) {
      double sum = 0;
      for (std::int64_t p = 0; p < P; ++p) sum += head[p] * w_kv_b(row % N * (P + V) + p, l);
      q.push_back(sum);
    }
    q.insert(q.end(), head + P, head + P + R);
  }
  if (form.q_scale > 0) {
    for (double& x : q) x = nearest_e4m3(x / form.q_scale) * form.q_scale;
  }
  std::vector<double> v;  // [keys, L]
  for (std::int64_t i = 0; i < keys; ++i) {
    const auto row = latent_rows.begin() + i * (L + R);
    v.insert(v.end(), row, row + L);
  }
  oracle::AttentionResult attended =
      oracle::attention({.num_queries = tokens,
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
    round_inputs(attended.out, row * L, L, form.latent_group);
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
