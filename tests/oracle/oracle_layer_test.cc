#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <stdexcept>
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

TEST(OracleRotary, PairingsByHand) {
  const double c = std::cos(2.0), s = std::sin(2.0), c1 = std::cos(0.2), s1 = std::sin(0.2);
  const std::vector<std::int64_t> positions = {2};
  std::vector<double> x = {1, 2, 3, 4};
  rotate(x, positions, 1, rotary(4, 100, true));  // Frequencies 1 and 1/10.
  EXPECT_LT(worst(x, {c - 2 * s, 2 * c + s, 3 * c1 - 4 * s1, 4 * c1 + 3 * s1}), 1e-15);
  x = {1, 2, 3, 4};
  rotate(x, positions, 1, rotary(4, 100, false));
  EXPECT_LT(worst(x, {c - 3 * s, 2 * c1 - 4 * s1, 3 * c + s, 4 * c1 + 2 * s1}), 1e-15);
}

TEST(OracleRotary, YarnKeepsFastPairsAndSlowsSlowOnes) {
  // DeepSeek-V2's numbers. A pair i turns 4096 theta_i / (2 pi) times within the original length:
  // 32 turns at i = 10.47, one turn at i = 22.51.
  const Yarn yarn{
      .factor = 40, .original_max_position = 4096, .mscale = 0.707, .mscale_all_dim = 0.707};
  const Rotary plain = rotary(64, 10000, true), scaled = rotary_yarn(64, 10000, true, yarn);
  for (std::size_t i = 0; i <= 10; ++i) EXPECT_DOUBLE_EQ(scaled.inv_freq[i], plain.inv_freq[i]);
  EXPECT_NEAR(scaled.inv_freq[16] / plain.inv_freq[16], 7.0 / 13 + 6.0 / 13 / 40, 1e-15);
  for (std::size_t i = 23; i < 32; ++i) {
    EXPECT_DOUBLE_EQ(scaled.inv_freq[i], plain.inv_freq[i] / 40);
  }
  EXPECT_EQ(scaled.amplitude, 1);
}

TEST(OracleRotary, YarnAmplitudeIsARatio) {
  EXPECT_NEAR(yarn_mscale(40, 1), 1.36889, 5e-6);
  EXPECT_NEAR(yarn_mscale(40, 0.707), 1.26080, 5e-6);
  EXPECT_EQ(yarn_mscale(1, 0.707), 1);
  EXPECT_EQ(yarn_mscale(40, 0), 1);
  const Yarn yarn{.factor = 40, .original_max_position = 4096, .mscale = 1, .mscale_all_dim = 0.5};
  EXPECT_NEAR(rotary_yarn(64, 10000, true, yarn).amplitude, 1.36889 / 1.184444, 1e-5);
  std::vector<double> x = {3, 4};
  Rotary rotary = rotary_yarn(2, 10000, true, yarn);
  rotate(x, std::vector<std::int64_t>{5}, 1, rotary);
  EXPECT_NEAR(std::hypot(x[0], x[1]), 5 * rotary.amplitude, 1e-14);
}

TEST(OracleRotary, LongRopeDividesAndAmplifies) {
  const std::vector<double> divisors = {1, 4};
  const Rotary within = rotary_long(4, 100, false, divisors, 32, 32);
  EXPECT_DOUBLE_EQ(within.inv_freq[0], 1);
  EXPECT_DOUBLE_EQ(within.inv_freq[1], 0.025);
  EXPECT_EQ(within.amplitude, 1);
  EXPECT_NEAR(rotary_long(4, 100, false, divisors, 1024, 32).amplitude, std::sqrt(2.0), 1e-15);
}

TEST(OracleRotary, YarnAsGptOssHasIt) {
  // A ramp between fractional pairs, 8.0928 and 17.398, and the paper's amplitude.
  Yarn yarn{.factor = 32, .original_max_position = 4096, .truncate = false};
  const Rotary plain = rotary(64, 150000, false);
  Rotary scaled = rotary_yarn(64, 150000, false, yarn);
  EXPECT_DOUBLE_EQ(scaled.inv_freq[8], plain.inv_freq[8]);
  EXPECT_NEAR(scaled.inv_freq[9] / plain.inv_freq[9], 0.9055510956043725, 1e-14);
  EXPECT_NEAR(scaled.inv_freq[17] / plain.inv_freq[17], 0.0726875139951586, 1e-14);
  EXPECT_NEAR(scaled.inv_freq[18] / plain.inv_freq[18], 0.03125, 1e-15);
  EXPECT_NEAR(scaled.amplitude, 1.3465735902799727, 1e-15);
  yarn.truncate = true;
  scaled = rotary_yarn(64, 150000, false, yarn);
  EXPECT_NEAR(scaled.inv_freq[9] / plain.inv_freq[9], 0.903125, 1e-14);
  EXPECT_NEAR(scaled.inv_freq[17] / plain.inv_freq[17], 0.128125, 1e-14);
  yarn.attention_factor = 1.25;
  EXPECT_EQ(rotary_yarn(64, 150000, false, yarn).amplitude, 1.25);
}

TEST(OracleRotary, LinearSlowsEveryPair) {
  const Rotary plain = rotary(8, 10000, true), scaled = rotary_linear(8, 10000, true, 4);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_DOUBLE_EQ(scaled.inv_freq[i], plain.inv_freq[i] / 4);
  }
  EXPECT_EQ(scaled.amplitude, 1);
  EXPECT_TRUE(scaled.interleaved);
}

TEST(OracleRotary, DynamicNtkGrowsWithTheLengthOnly) {
  // theta 10000 * (4 * 4096 / 2048 - 3)^(8 / 6): the last pair is 5 times slower.
  const Rotary scaled = rotary_dynamic_ntk(8, 10000, false, 4, 4096, 2048);
  const std::vector<double> expected = {1, 5.84803548e-02, 3.41995189e-03, 2e-4};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(scaled.inv_freq[i] / expected[i], 1, 2e-9);
  }
  for (double length : {1.0, 2048.0}) {
    EXPECT_LT(worst(rotary_dynamic_ntk(8, 10000, false, 4, length, 2048).inv_freq,
                    rotary(8, 10000, false).inv_freq),
              1e-15);
  }
}

TEST(OracleRotary, Llama3KeepsFastPairsAndSlowsSlowOnes) {
  // Llama 3.1 8B's numbers; four turns within 8192 positions at pair 28.2, one at pair 34.96.
  const Rotary plain = rotary(128, 500000, false);
  const Rotary scaled = rotary_llama3(
      128, 500000, false,
      {.factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position = 8192});
  const auto ratio = [&](std::size_t i) { return scaled.inv_freq[i] / plain.inv_freq[i]; };
  EXPECT_DOUBLE_EQ(ratio(28), 1);
  EXPECT_NEAR(ratio(29), 0.82816841183718, 1e-14);
  EXPECT_NEAR(ratio(32), 0.371122279517845, 1e-14);
  EXPECT_NEAR(ratio(34), 0.19021074364065, 1e-14);
  EXPECT_DOUBLE_EQ(ratio(35), 0.125);
}

TEST(OracleRotary, ChannelsBehindTheRotaryOnesStay) {
  const double c = std::cos(2.0), s = std::sin(2.0);
  const std::vector<std::int64_t> positions = {2};
  std::vector<double> x = {1, 2, 3, 4, 5, 6};  // Two heads of three channels.
  rotate(x, positions, 2, rotary(2, 100, false), 3);
  EXPECT_LT(worst(x, {c - 2 * s, 2 * c + s, 3, 4 * c - 5 * s, 5 * c + 4 * s, 6}), 1e-15);
  rotate(x, positions, 2, Rotary(), 3);  // No frequencies: nothing turns.
  EXPECT_EQ(x[2], 3);
  EXPECT_THROW(rotate(x, positions, 3, rotary(4, 100, false), 2), std::invalid_argument);
  EXPECT_THROW(rotate(x, positions, 1, rotary(2, 100, false), 3), std::invalid_argument);
}

TEST(OracleRotary, PairsHavePositionsOfTheirOwn) {
  const double c = std::cos(3.0), s = std::sin(3.0), c1 = std::cos(0.7), s1 = std::sin(0.7);
  std::vector<double> x = {1, 2, 3, 4};
  rotate_pairs(x, std::vector<std::int64_t>{3, 7}, 1, rotary(4, 100, false));
  EXPECT_LT(worst(x, {c - 3 * s, 2 * c1 - 4 * s1, 3 * c + s, 4 * c1 + 2 * s1}), 1e-15);
  EXPECT_THROW(rotate_pairs(x, std::vector<std::int64_t>{3, 7, 1}, 1, rotary(4, 100, false)),
               std::invalid_argument);
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

/// The layer written once more, element by element, sharing nothing with the oracle.
std::vector<double> layer_element_by_element(const MlaWeights& w, const std::vector<double>& h,
                                             std::int64_t tokens) {
  const auto at = [](const std::vector<double>& v, std::int64_t i) {
    return v[static_cast<std::size_t>(i)];
  };
  const auto project = [&](const std::vector<double>& x, const std::vector<double>& m,
                           std::int64_t in, std::int64_t row, std::int64_t o) {
    double sum = 0;
    for (std::int64_t i = 0; i < in; ++i) sum += at(x, row * in + i) * at(m, o * in + i);
    return sum;
  };
  const auto norm = [&](std::vector<double>& x, std::int64_t begin, const std::vector<double>& m) {
    double squares = 0;
    const auto n = static_cast<std::int64_t>(m.size());
    for (std::int64_t i = 0; i < n; ++i) squares += at(x, begin + i) * at(x, begin + i);
    for (std::int64_t i = 0; i < n; ++i) {
      x[static_cast<std::size_t>(begin + i)] *=
          at(m, i) / std::sqrt(squares / static_cast<double>(n) + w.rms_norm_eps);
    }
  };
  const auto turned = [&](double a, double b, std::int64_t position, std::int64_t pair) {
    const double angle =
        static_cast<double>(position) *
        std::pow(10000, -2.0 * static_cast<double>(pair) / static_cast<double>(w.qk_rope_head_dim));
    return std::pair{a * std::cos(angle) - b * std::sin(angle),
                     a * std::sin(angle) + b * std::cos(angle)};
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
          const auto [qa, qb] = turned(at(q, qi), at(q, qi + 1), t, i);
          const auto [ka, kb] = turned(at(kv_a, ki), at(kv_a, ki + 1), s, i);
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
