// Windows, attention chunks, draft trees, sinks and soft caps, by masks and weights done by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "fovea/oracle.h"

namespace fovea::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One head whose keys all score `score`, with values that are the rows of a unit matrix: an output
/// row is the keys' weights.
struct Weights {
  Attention problem;
  std::vector<double> q, k, v, sinks;
  std::vector<std::uint64_t> tree;

  Weights(std::int64_t queries, std::int64_t keys, double score = 0)
      : q(static_cast<std::size_t>(queries), 1.0),
        k(static_cast<std::size_t>(keys), score),
        v(static_cast<std::size_t>(keys * keys)) {
    problem.num_queries = queries;
    problem.num_keys = problem.v_dim = keys;
    problem.num_heads = problem.num_kv_heads = problem.qk_dim = 1;
    problem.sm_scale = 1;
    for (std::int64_t j = 0; j < keys; ++j) v[static_cast<std::size_t>(j * keys + j)] = 1;
  }

  AttentionResult run() {
    problem.q = q;
    problem.k = k;
    problem.v = v;
    problem.sinks = sinks;
    problem.draft_tree = tree;
    return attention(problem);
  }

  /// The keys that each query sees.
  std::vector<std::vector<int>> seen() {
    const std::vector<double> out = run().out;
    std::vector<std::vector<int>> keys;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto n = static_cast<std::size_t>(problem.num_keys);
      if (i % n == 0) keys.emplace_back();
      if (out[i] > 0) keys.back().push_back(static_cast<int>(i % n));
    }
    return keys;
  }
};

using Keys = std::vector<std::vector<int>>;

TEST(OracleWindow, StandsAtAbsolutePositions) {  // F240, F242, F244
  Weights w(3, 5);
  w.problem.window_left = 1;
  EXPECT_EQ(w.seen(), (Keys{{1, 2}, {2, 3}, {3, 4}}));
  w.problem.window_left = 0;
  EXPECT_EQ(w.seen(), (Keys{{2}, {3}, {4}}));
  for (std::int64_t off : {std::int64_t{-1}, std::int64_t{-7}, std::int64_t{5}}) {
    w.problem.window_left = off;
    EXPECT_EQ(w.seen(), (Keys{{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}}));
  }
  Weights more(5, 3);
  more.problem.window_left = 1;
  EXPECT_EQ(more.seen(), (Keys{{}, {}, {0}, {0, 1}, {1, 2}}));
}

TEST(OracleWindow, BoundsTheLeftAloneWithoutACausalMask) {  // F241, F243
  Weights w(3, 5);
  w.problem.window_left = 1;
  w.problem.causal = false;
  EXPECT_EQ(w.seen(), (Keys{{1, 2, 3, 4}, {2, 3, 4}, {3, 4}}));
  for (bool causal : {true, false}) {
    Weights one(1, 5);
    one.problem.window_left = 1;
    one.problem.causal = causal;
    EXPECT_EQ(one.seen(), (Keys{{3, 4}}));
  }
}

TEST(OracleWindow, MayCountFromTheQuerysRow) {  // F239, F243, F339
  Weights w(3, 5);
  w.problem.window_left = 1;
  w.problem.window_from_row = true;
  EXPECT_EQ(w.seen(), (Keys{{0, 1, 2}, {0, 1, 2, 3}, {1, 2, 3, 4}}));
  w.problem.causal = false;
  EXPECT_EQ(w.seen(), (Keys{{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, {1, 2, 3, 4}}));
  Weights square(4, 4);
  square.problem.window_left = 2;
  const Keys absolute = square.seen();
  square.problem.window_from_row = true;
  EXPECT_EQ(square.seen(), absolute);
}

TEST(OracleChunk, AQuerySeesKeysOfItsOwnChunk) {  // B104, B105
  Weights w(6, 6);
  w.problem.attention_chunk = 3;
  EXPECT_EQ(w.seen(), (Keys{{0}, {0, 1}, {0, 1, 2}, {3}, {3, 4}, {3, 4, 5}}));
  w.problem.window_left = 1;
  EXPECT_EQ(w.seen(), (Keys{{0}, {0, 1}, {1, 2}, {3}, {3, 4}, {4, 5}}));
  Weights decode(1, 5);
  decode.problem.attention_chunk = 4;
  EXPECT_EQ(decode.seen(), (Keys{{4}}));
  decode.problem.attention_chunk = 5;
  EXPECT_EQ(decode.seen(), (Keys{{0, 1, 2, 3, 4}}));
  Weights more(4, 2);
  more.problem.attention_chunk = 4;
  EXPECT_EQ(more.seen(), (Keys{{}, {}, {0}, {0, 1}}));
}

TEST(OracleDraftTree, ADraftSeesTheContextAndItsAncestors) {
  // 0 is the root, 1 and 2 its children, 3 a child of 2: positions 3, 4, 4, 5.
  Weights w(4, 7);
  w.tree = {0b0001, 0b0011, 0b0101, 0b1101};
  EXPECT_EQ(w.seen(), (Keys{{0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 5}, {0, 1, 2, 3, 5, 6}}));
  w.problem.window_left = 2;
  EXPECT_EQ(w.seen(), (Keys{{1, 2, 3}, {2, 3, 4}, {2, 3, 5}, {3, 5, 6}}));
  w.problem.window_left = -1;
  w.problem.attention_chunk = 4;
  EXPECT_EQ(w.seen(), (Keys{{0, 1, 2, 3}, {4}, {5}, {5, 6}}));
}

TEST(OracleDraftTree, AChainIsThePlainOrder) {
  Weights w(4, 9);
  w.problem.window_left = 5;
  const Keys plain = w.seen();
  w.tree = {1, 3, 7, 15};
  EXPECT_EQ(w.seen(), plain);
}

TEST(OracleSink, IsOneMoreColumnThatIsDropped) {  // F228, B112
  Weights w(1, 2);
  w.sinks = {0};
  AttentionResult result = w.run();
  EXPECT_NEAR(result.out[0], 1.0 / 3, 1e-15);
  EXPECT_NEAR(result.out[1], 1.0 / 3, 1e-15);
  EXPECT_NEAR(result.lse[0], std::log(2.0), 1e-15);  // Without the sink.

  Weights three(1, 3);
  three.k = {1, 2, 3};
  three.sinks = {2};
  result = three.run();
  EXPECT_NEAR(result.out[0], 0.07232949, 5e-9);
  EXPECT_NEAR(result.out[1], 0.19661193, 5e-9);
  EXPECT_NEAR(result.out[2], 0.53444665, 5e-9);

  const std::vector<double> plain = Weights(1, 2).run().out;
  w.sinks = {-kInfinity};
  EXPECT_EQ(w.run().out, plain);
}

TEST(OracleSink, IsNeitherScaledNorCapped) {
  Weights w(1, 2);
  w.k = {4, 4};
  w.problem.sm_scale = 0.5;  // Scores 2.
  w.sinks = {3};
  EXPECT_NEAR(w.run().out[0], std::exp(2) / (2 * std::exp(2) + std::exp(3)), 1e-15);
  w.problem.soft_cap = 1;
  const double capped = std::exp(std::tanh(2));
  EXPECT_NEAR(w.run().out[0], capped / (2 * capped + std::exp(3)), 1e-15);
}

TEST(OracleSink, RowsWithoutKeysStayZero) {  // F230
  Weights w(3, 1);
  for (double sink : {2.0, -kInfinity, 1000.0}) {
    w.sinks = {sink};
    const AttentionResult result = w.run();
    EXPECT_EQ(result.out[0], 0);
    EXPECT_EQ(result.out[1], 0);
    EXPECT_EQ(result.lse[0], -kInfinity);
  }
}

TEST(OracleSink, FarFromTheScoresNeitherOverflowsNorVanishes) {  // B114
  Weights w(1, 2, -100);
  w.sinks = {80};
  EXPECT_NEAR(w.run().out[0] / std::exp(-180), 1, 1e-12);
  w.sinks = {-2000};
  EXPECT_EQ(w.run().out[0], 0.5);
  w.sinks = {2000};
  EXPECT_EQ(w.run().out[0], 0);
  EXPECT_NEAR(w.run().lse[0], std::log(2.0) - 100, 1e-13);
}

TEST(OracleSink, EachHeadHasItsOwn) {  // F229
  const std::vector<double> q(4), k(2), v = {1, 1}, sinks = {0, 1, 2, -kInfinity};
  const AttentionResult result = attention({.num_queries = 1,
                                            .num_keys = 1,
                                            .num_heads = 4,
                                            .num_kv_heads = 2,
                                            .qk_dim = 1,
                                            .v_dim = 1,
                                            .sm_scale = 1,
                                            .sinks = sinks,
                                            .q = q,
                                            .k = k,
                                            .v = v});
  for (std::size_t h = 0; h < 4; ++h) {
    EXPECT_NEAR(result.out[h], 1 / (1 + std::exp(sinks[h])), 1e-15);
  }
}

TEST(OracleSoftCap, BendsScores) {  // B213, B215
  Weights w(1, 2);
  w.k = {60, 0};
  w.problem.soft_cap = 30;
  EXPECT_NEAR(w.run().lse[0], std::log1p(std::exp(30 * std::tanh(2.0))), 1e-13);
  EXPECT_NEAR(30 * std::tanh(2.0), 28.92, 5e-3);
  Weights three(1, 3);
  three.k = {4400, 5000, -10000};
  three.problem.soft_cap = 50;
  const std::vector<double> out = three.run().out;
  EXPECT_NEAR(out[0], 0.5, 1e-15);
  EXPECT_NEAR(out[1], 0.5, 1e-15);
  EXPECT_LT(out[2], 1e-43);
}

TEST(OracleRules, WrongOnesAreRefused) {
  const auto refused = [](auto&& change) {
    Weights w(2, 4);
    change(w);
    EXPECT_THROW(w.run(), std::invalid_argument);
  };
  refused([](Weights& w) { w.sinks = {1, 2}; });
  refused([](Weights& w) { w.tree = {1}; });
  refused([](Weights& w) { w.problem.soft_cap = -1; });
  refused([](Weights& w) { w.problem.attention_chunk = -1; });
  refused([](Weights& w) {
    w.problem.attention_chunk = 2;
    w.problem.causal = false;
  });
  refused([](Weights& w) {
    w.tree = {1, 3};
    w.problem.causal = false;
  });
}

TEST(OracleMerge, ASinkJoinsTheDenominatorOnce) {  // F245
  Weights whole(1, 4);
  whole.k = {0.5, -1, 2, 1};
  const auto part = [&](int begin, int end) {
    Weights w(1, 4);
    w.problem.num_keys = end - begin;
    w.k.assign(whole.k.begin() + begin, whole.k.begin() + end);
    w.v.assign(whole.v.begin() + 4 * begin, whole.v.begin() + 4 * end);
    return w.run();
  };
  const std::vector<double> sinks = {1.5};
  const AttentionResult merged = oracle::merge(part(0, 1), part(1, 4), 1, 1, 4, sinks);
  whole.sinks = sinks;
  const AttentionResult expected = whole.run();
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(merged.out[i], expected.out[i], 1e-15);
  EXPECT_NEAR(merged.lse[0], expected.lse[0], 1e-15);
  // Twice would be seen.
  const AttentionResult twice =
      oracle::merge(expected, {{0, 0, 0, 0}, {-kInfinity}}, 1, 1, 4, sinks);
  EXPECT_GT(expected.out[2] - twice.out[2], 0.1);
}

}  // namespace
}  // namespace fovea::oracle
