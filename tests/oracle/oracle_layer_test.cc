#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fovea/oracle.h"

namespace fovea::oracle {
namespace {

std::vector<double> normal(std::int64_t n, double deviation, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> distribution(0, deviation);
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& value : values) value = distribution(generator);
  return values;
}

double worst(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double result = 0;
  for (std::size_t i = 0; i < a.size(); ++i) result = std::max(result, std::abs(a[i] - b[i]));
  return result;
}

TEST(OracleProjection, ByHand) {
  const std::vector<double> x = {3, 4, 0, 0}, weight = {1, 2};
  const std::vector<double> normed = rms_norm(x, weight, 0);
  EXPECT_NEAR(normed[0], 3 / std::sqrt(12.5), 1e-15);
  EXPECT_NEAR(normed[1], 8 / std::sqrt(12.5), 1e-15);
  EXPECT_NEAR(rms_norm(x, weight, 12.5)[1], 8 / 5.0, 1e-15);

  const std::vector<double> w = {1, 10, 2, 20, 3, 30}, bias = {0.5, 0, -1};  // [3, 2]
  const std::vector<double> rows = {1, 2, -1, 0};
  EXPECT_EQ(linear(rows, w, bias, 2), (std::vector<double>{21.5, 42, 62, -0.5, -2, -4}));
  EXPECT_THROW(linear(rows, w, std::vector<double>(2), 2), std::invalid_argument);
}

TEST(OracleProjection, AnyRowCountAndWidth) {
  for (std::int64_t rows : {1, 15, 16, 17, 40}) {
    for (std::int64_t in : {1, 7, 8, 9, 24}) {
      const std::vector<double> x = normal(rows * in, 1, 1), w = normal(3 * in, 1, 2);
      std::vector<double> expected;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t o = 0; o < 3; ++o) {
          double sum = 0;
          for (std::int64_t i = 0; i < in; ++i) {
            sum +=
                x[static_cast<std::size_t>(r * in + i)] * w[static_cast<std::size_t>(o * in + i)];
          }
          expected.push_back(sum);
        }
      }
      EXPECT_LT(worst(linear(x, w, {}, in), expected), 1e-13);
    }
  }
}

struct Case {
  std::int64_t N, Lq, L, P, R, V, H;
};

MlaWeights random_weights(const Case& c) {
  MlaWeights w;
  w.hidden_size = c.H;
  w.num_heads = c.N;
  w.q_lora_rank = c.Lq;
  w.kv_lora_rank = c.L;
  w.qk_nope_head_dim = c.P;
  w.qk_rope_head_dim = c.R;
  w.v_head_dim = c.V;
  w.sm_scale = 2.0 / std::sqrt(static_cast<double>(c.P + c.R));
  const auto weight = [](std::int64_t out, std::int64_t in, unsigned seed) {
    return normal(out * in, 1 / std::sqrt(static_cast<double>(in)), seed);
  };
  if (c.Lq > 0) {
    w.q_a_proj = weight(c.Lq, c.H, 1);
    w.q_a_bias = normal(c.Lq, 1, 2);
    w.q_a_layernorm = normal(c.Lq, 1, 3);
  }
  w.q_b_proj = weight(c.N * (c.P + c.R), c.Lq > 0 ? c.Lq : c.H, 4);
  w.kv_a_proj = weight(c.L + c.R, c.H, 5);
  w.kv_a_bias = normal(c.L + c.R, 1, 6);
  w.kv_a_layernorm = normal(c.L, 1, 7);
  w.kv_b_proj = weight(c.N * (c.P + c.V), c.L, 8);
  w.o_proj = weight(c.H, c.N * c.V, 9);
  w.o_bias = normal(c.H, 1, 10);
  w.rotary = rotary(c.R, 10000, true);
  return w;
}

double at(const std::vector<double>& v, std::int64_t i) { return v[static_cast<std::size_t>(i)]; }

/// Element `o` of row `row` of x [rows, in] times the transpose of m [out, in].
double project(const std::vector<double>& x, const std::vector<double>& m, std::int64_t in,
               std::int64_t row, std::int64_t o) {
  double sum = 0;
  for (std::int64_t i = 0; i < in; ++i) sum += at(x, row * in + i) * at(m, o * in + i);
  return sum;
}

/// Channels 2 pair and the next, turned by the position's angle.
std::pair<double, double> turned(const MlaWeights& w, double a, double b, std::int64_t position,
                                 std::int64_t pair) {
  const double angle =
      static_cast<double>(position) *
      std::pow(10000, -2.0 * static_cast<double>(pair) / static_cast<double>(w.qk_rope_head_dim));
  return {a * std::cos(angle) - b * std::sin(angle), a * std::sin(angle) + b * std::cos(angle)};
}

/// The layer written once more, element by element, sharing nothing with the oracle.
std::vector<double> layer_element_by_element(const MlaWeights& w, const std::vector<double>& h,
                                             std::int64_t tokens) {
  const auto norm = [&](std::vector<double>& x, std::int64_t begin, const std::vector<double>& m) {
    double squares = 0;
    const auto n = static_cast<std::int64_t>(m.size());
    for (std::int64_t i = 0; i < n; ++i) squares += at(x, begin + i) * at(x, begin + i);
    for (std::int64_t i = 0; i < n; ++i) {
      x[static_cast<std::size_t>(begin + i)] *=
          at(m, i) / std::sqrt(squares / static_cast<double>(n) + w.rms_norm_eps);
    }
  };
  const std::int64_t N = w.num_heads, L = w.kv_lora_rank, P = w.qk_nope_head_dim,
                     R = w.qk_rope_head_dim, V = w.v_head_dim, H = w.hidden_size,
                     Lq = w.q_lora_rank;
  std::vector<double> query_input = h, q, kv_a;
  if (Lq > 0) {
    query_input.clear();
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t o = 0; o < Lq; ++o) {
        query_input.push_back(project(h, w.q_a_proj, H, t, o) + at(w.q_a_bias, o));
      }
      norm(query_input, t * Lq, w.q_a_layernorm);
    }
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t o = 0; o < N * (P + R); ++o) {
      q.push_back(project(query_input, w.q_b_proj, Lq > 0 ? Lq : H, t, o));
    }
    for (std::int64_t o = 0; o < L + R; ++o) {
      kv_a.push_back(project(h, w.kv_a_proj, H, t, o) + at(w.kv_a_bias, o));
    }
    norm(kv_a, t * (L + R), w.kv_a_layernorm);
  }
  std::vector<double> result;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<double> heads;
    for (std::int64_t n = 0; n < N; ++n) {
      std::vector<double> weight;
      double sum = 0;
      for (std::int64_t s = 0; s <= t; ++s) {
        double score = 0;
        for (std::int64_t p = 0; p < P; ++p) {
          double key = 0;
          for (std::int64_t l = 0; l < L; ++l) {
            key += at(kv_a, s * (L + R) + l) * at(w.kv_b_proj, (n * (P + V) + p) * L + l);
          }
          score += key * at(q, (t * N + n) * (P + R) + p);
        }
        for (std::int64_t i = 0; i < R / 2; ++i) {
          const std::int64_t qi = (t * N + n) * (P + R) + P + 2 * i, ki = s * (L + R) + L + 2 * i;
          const auto [qa, qb] = turned(w, at(q, qi), at(q, qi + 1), t, i);
          const auto [ka, kb] = turned(w, at(kv_a, ki), at(kv_a, ki + 1), s, i);
          score += qa * ka + qb * kb;
        }
        weight.push_back(std::exp(score * w.sm_scale));
        sum += weight.back();
      }
      for (std::int64_t v = 0; v < V; ++v) {
        double out = 0;
        for (std::int64_t s = 0; s <= t; ++s) {
          double value = 0;
          for (std::int64_t l = 0; l < L; ++l) {
            value += at(kv_a, s * (L + R) + l) * at(w.kv_b_proj, (n * (P + V) + P + v) * L + l);
          }
          out += weight[static_cast<std::size_t>(s)] / sum * value;
        }
        heads.push_back(out);
      }
    }
    for (std::int64_t o = 0; o < H; ++o) {
      result.push_back(project(heads, w.o_proj, N * V, 0, o) + at(w.o_bias, o));
    }
  }
  return result;
}

class OracleMla : public testing::TestWithParam<Case> {};

TEST_P(OracleMla, LayerEqualsTheFormulaElementByElement) {
  const MlaWeights w = random_weights(GetParam());
  constexpr std::int64_t kTokens = 5;
  const std::vector<double> hidden = normal(kTokens * w.hidden_size, 1, 20);
  const std::vector<std::int64_t> positions = {0, 1, 2, 3, 4};
  const std::vector<double> rows = mla_latent_rows(w, hidden, positions);
  const std::vector<double> expected = layer_element_by_element(w, hidden, kTokens);
  for (MlaForm form : {MlaForm::expanded, MlaForm::absorbed}) {
    EXPECT_LT(worst(mla_layer(w, hidden, positions, rows, form), expected), 1e-12);
  }
}

TEST_P(OracleMla, FormsAgreeAndTheLatentWidthIsNotTheScale) {
  MlaWeights w = random_weights(GetParam());
  constexpr std::int64_t kQueries = 3, kKeys = 40;
  const std::vector<double> queries =
      normal(kQueries * w.num_heads * (w.qk_nope_head_dim + w.qk_rope_head_dim), 1, 30);
  const std::vector<double> rows = normal(kKeys * (w.kv_lora_rank + w.qk_rope_head_dim), 1, 31);
  for (bool causal : {true, false}) {
    const std::vector<double> expanded = mla_attention(w, queries, rows, causal, MlaForm::expanded);
    EXPECT_LT(worst(mla_attention(w, queries, rows, causal, MlaForm::absorbed), expanded), 1e-13);
    MlaWeights wrong = w;
    wrong.sm_scale *= std::sqrt(static_cast<double>(w.qk_nope_head_dim + w.qk_rope_head_dim) /
                                static_cast<double>(w.kv_lora_rank + w.qk_rope_head_dim));
    EXPECT_GT(worst(mla_attention(wrong, queries, rows, causal, MlaForm::absorbed), expanded),
              1e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, OracleMla,
                         testing::Values(Case{1, 0, 8, 2, 2, 3, 5}, Case{4, 0, 32, 16, 8, 16, 24},
                                         Case{3, 6, 16, 5, 4, 9, 10},
                                         Case{2, 4, 24, 12, 8, 16, 40}));

TEST(OracleMlaErrors, NameTheArgument) {
  MlaWeights w = random_weights({2, 0, 8, 4, 2, 4, 6});
  w.kv_b_proj.pop_back();
  try {
    mla_attention(w, std::vector<double>(2 * 6), std::vector<double>(10), true, MlaForm::expanded);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "kv_b_proj holds 127 values, needs 128");
  }
  EXPECT_THROW(
      mla_attention(w, std::vector<double>(13), std::vector<double>(10), true, MlaForm::expanded),
      std::invalid_argument);
}

}  // namespace
}  // namespace fovea::oracle
