// Layers of grouped-query attention.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <stdexcept>
#include <string>
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

struct GqaCase {
  std::int64_t N, Hk, D, Dv, R, H;
  enum class Norm { none, heads, whole } norm;
  bool after, bias, sinks, interleaved;
  std::int64_t window_left, chunk;
  double soft_cap;
};

GqaWeights random_weights(const GqaCase& c) {
  GqaWeights w;
  w.hidden_size = c.H;
  w.num_heads = c.N;
  w.num_kv_heads = c.Hk;
  w.head_dim = c.D;
  w.v_head_dim = c.Dv;
  w.sm_scale = 2.0 / std::sqrt(static_cast<double>(c.D));
  const auto weight = [](std::int64_t out, std::int64_t in, unsigned seed) {
    return normal(out * in, 1 / std::sqrt(static_cast<double>(in)), seed);
  };
  w.q_proj = weight(c.N * c.D, c.H, 1);
  w.k_proj = weight(c.Hk * c.D, c.H, 2);
  w.v_proj = weight(c.Hk * c.Dv, c.H, 3);
  w.o_proj = weight(c.H, c.N * c.Dv, 4);
  if (c.bias) {
    w.q_bias = normal(c.N * c.D, 1, 5);
    w.k_bias = normal(c.Hk * c.D, 1, 6);
    w.v_bias = normal(c.Hk * c.Dv, 1, 7);
    w.o_bias = normal(c.H, 1, 8);
  }
  if (c.norm != GqaCase::Norm::none) {
    const bool whole = c.norm == GqaCase::Norm::whole;
    w.q_norm = normal(whole ? c.N * c.D : c.D, 1, 9);
    w.k_norm = normal(whole ? c.Hk * c.D : c.D, 1, 10);
  }
  w.norm_after_rope = c.after;
  if (c.sinks) w.sinks = normal(c.N, 2, 11);
  if (c.R > 0) w.rotary = rotary(c.R, 100, c.interleaved);
  w.window_left = c.window_left;
  w.attention_chunk = c.chunk;
  w.soft_cap = c.soft_cap;
  return w;
}

/// The layer of tokens 0 to `tokens`, written once more, element by element.
class GqaElementByElement {
 public:
  GqaElementByElement(const GqaWeights& w, const std::vector<double>& hidden)
      : w_(w), hidden_(hidden) {}

  std::vector<double> operator()(std::int64_t tokens) const {
    std::vector<double> result;
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<double> heads;
      for (std::int64_t n = 0; n < w_.num_heads; ++n) add_head(heads, t, n);
      for (std::int64_t o = 0; o < w_.hidden_size; ++o) {
        double sum = at_or_zero(w_.o_bias, o);
        for (std::size_t i = 0; i < heads.size(); ++i) {
          sum += heads[i] * w_.o_proj[static_cast<std::size_t>(o) * heads.size() + i];
        }
        result.push_back(sum);
      }
    }
    return result;
  }

 private:
  static double at_or_zero(const std::vector<double>& v, std::int64_t i) {
    return v.empty() ? 0 : v[static_cast<std::size_t>(i)];
  }

  double project(const std::vector<double>& m, const std::vector<double>& bias, std::int64_t t,
                 std::int64_t o) const {
    double sum = at_or_zero(bias, o);
    for (std::int64_t i = 0; i < w_.hidden_size; ++i) {
      sum += hidden_[static_cast<std::size_t>(t * w_.hidden_size + i)] *
             m[static_cast<std::size_t>(o * w_.hidden_size + i)];
    }
    return sum;
  }

  void turn(std::vector<double>& x, std::int64_t t, std::int64_t heads) const {
    const std::size_t half = w_.rotary.inv_freq.size();
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::size_t i = 0; i < half; ++i) {
        const auto begin = static_cast<std::size_t>(h * w_.head_dim);
        double& a = x[begin + (w_.rotary.interleaved ? 2 * i : i)];
        double& b = x[begin + (w_.rotary.interleaved ? 2 * i + 1 : i + half)];
        const double angle = static_cast<double>(t) *
                             std::pow(100, -static_cast<double>(i) / static_cast<double>(half));
        const double old = a;
        a = old * std::cos(angle) - b * std::sin(angle);
        b = old * std::sin(angle) + b * std::cos(angle);
      }
    }
  }

  /// q or k of token t, all heads.
  std::vector<double> heads_of(const std::vector<double>& m, const std::vector<double>& bias,
                               const std::vector<double>& norm, std::int64_t t,
                               std::int64_t heads) const {
    std::vector<double> x;
    for (std::int64_t o = 0; o < heads * w_.head_dim; ++o) x.push_back(project(m, bias, t, o));
    if (w_.norm_after_rope) turn(x, t, heads);
    for (std::size_t begin = 0; !norm.empty() && begin < x.size(); begin += norm.size()) {
      double squares = 0;
      for (std::size_t i = 0; i < norm.size(); ++i) squares += x[begin + i] * x[begin + i];
      const double mean = squares / static_cast<double>(norm.size());
      for (std::size_t i = 0; i < norm.size(); ++i) {
        x[begin + i] *= norm[i] / std::sqrt(mean + w_.rms_norm_eps);
      }
    }
    if (!w_.norm_after_rope) turn(x, t, heads);
    return x;
  }

  void add_head(std::vector<double>& heads, std::int64_t t, std::int64_t n) const {
    const std::int64_t kv = n * w_.num_kv_heads / w_.num_heads;
    const std::vector<double> q = heads_of(w_.q_proj, w_.q_bias, w_.q_norm, t, w_.num_heads);
    double denominator = w_.sinks.empty() ? 0 : std::exp(at_or_zero(w_.sinks, n));
    std::vector<double> out(static_cast<std::size_t>(w_.v_head_dim));
    for (std::int64_t s = 0; s <= t; ++s) {
      if (w_.window_left >= 0 && s + w_.window_left < t) continue;
      if (w_.attention_chunk > 0 && s / w_.attention_chunk != t / w_.attention_chunk) continue;
      const std::vector<double> k = heads_of(w_.k_proj, w_.k_bias, w_.k_norm, s, w_.num_kv_heads);
      double score = 0;
      for (std::int64_t i = 0; i < w_.head_dim; ++i) {
        score += q[static_cast<std::size_t>(n * w_.head_dim + i)] *
                 k[static_cast<std::size_t>(kv * w_.head_dim + i)];
      }
      score *= w_.sm_scale;
      if (w_.soft_cap > 0) score = w_.soft_cap * std::tanh(score / w_.soft_cap);
      denominator += std::exp(score);
      for (std::int64_t v = 0; v < w_.v_head_dim; ++v) {
        out[static_cast<std::size_t>(v)] +=
            std::exp(score) * project(w_.v_proj, w_.v_bias, s, kv * w_.v_head_dim + v);
      }
    }
    for (double x : out) heads.push_back(x / denominator);
  }

  const GqaWeights& w_;
  const std::vector<double>& hidden_;
};

class OracleGqa : public testing::TestWithParam<GqaCase> {};

TEST_P(OracleGqa, LayerEqualsTheFormulaElementByElement) {
  const GqaWeights w = random_weights(GetParam());
  constexpr std::int64_t kTokens = 7;
  const std::vector<double> hidden = normal(kTokens * w.hidden_size, 1, 20);
  const std::vector<std::int64_t> positions = {0, 1, 2, 3, 4, 5, 6};
  const std::vector<double> rows = gqa_rows(w, hidden, positions);
  const std::vector<double> expected = GqaElementByElement(w, hidden)(kTokens);
  EXPECT_LT(worst(gqa_layer(w, hidden, positions, rows), expected), 1e-12);

  // The last two tokens alone, over all stored rows.
  const auto tail = static_cast<std::size_t>(2 * w.hidden_size);
  EXPECT_LT(worst(gqa_layer(w, std::span(hidden).last(tail), std::span(positions).last(2), rows),
                  {expected.end() - static_cast<std::ptrdiff_t>(tail), expected.end()}),
            1e-12);
}

using Norm = GqaCase::Norm;
INSTANTIATE_TEST_SUITE_P(
    Options, OracleGqa,
    testing::Values(GqaCase{4, 2, 8, 8, 8, 12, Norm::none, false, false, false, false, -1, 0, 0},
                    GqaCase{4, 4, 6, 5, 4, 10, Norm::heads, false, true, true, false, 2, 0, 0},
                    GqaCase{6, 2, 8, 8, 8, 9, Norm::whole, false, false, false, true, -1, 3, 0},
                    GqaCase{6, 1, 4, 6, 2, 16, Norm::heads, true, true, false, true, -1, 0, 1.5},
                    GqaCase{2, 2, 8, 4, 6, 8, Norm::whole, true, false, true, false, 1, 0, 3},
                    GqaCase{5, 1, 3, 3, 0, 7, Norm::heads, false, true, true, false, 0, 0, 0}));

TEST(OracleGqaLayer, PairsMayHavePositionsOfTheirOwn) {
  const GqaWeights w =
      random_weights({2, 1, 8, 8, 8, 8, Norm::none, false, false, false, false, -1, 0, 0});
  const std::vector<double> hidden = normal(2 * 8, 1, 1);
  const std::vector<std::int64_t> same = {5, 5, 5, 5, 9, 9, 9, 9}, mixed = {5, 6, 7, 5, 9, 9, 9, 1};
  EXPECT_EQ(gqa_rows(w, hidden, same), gqa_rows(w, hidden, std::vector<std::int64_t>{5, 9}));
  GqaWeights unturned = w;
  unturned.rotary = {};
  std::vector<double> queries = gqa_queries(unturned, hidden, mixed);
  rotate_pairs(queries, mixed, 2, w.rotary);
  EXPECT_EQ(gqa_queries(w, hidden, mixed), queries);
}

TEST(OracleGqaErrors, NameTheArgument) {
  GqaWeights w =
      random_weights({4, 2, 8, 8, 8, 12, Norm::none, false, false, false, false, -1, 0, 0});
  const std::vector<double> hidden(12);
  const std::vector<std::int64_t> positions = {0};
  const auto message = [&] {
    try {
      gqa_rows(w, hidden, positions);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  w.k_proj.pop_back();
  EXPECT_EQ(message(), "k_proj holds 191 values, needs 192");
  w.k_proj.push_back(0);
  w.k_norm.resize(7);
  EXPECT_EQ(message(), "k_norm holds 7 values, needs 8 or 16");
  w.k_norm.clear();
  w.num_heads = 5;
  EXPECT_THROW(gqa_queries(w, hidden, positions), std::invalid_argument);
}

}  // namespace
}  // namespace fovea::oracle
