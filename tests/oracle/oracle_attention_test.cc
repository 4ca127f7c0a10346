#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "fovea/oracle.h"

namespace fovea::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> normal(std::size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> distribution;
  std::vector<double> values(n);
  for (double& value : values) value = distribution(generator);
  return values;
}

TEST(OracleDecode, KnownCodes) {
  const std::vector<std::uint16_t> f16 = {0x0000, 0x3c00, 0xc000, 0x7bff, 0x0400,
                                          0x0001, 0x3555, 0x7c00, 0xfc00};
  const std::vector<double> expected = {
      0,         1,         -2, 65504, std::ldexp(1, -14), std::ldexp(1, -24), 0.333251953125,
      kInfinity, -kInfinity};
  EXPECT_EQ(decode(f16.data(), 9, Format::f16), expected);
  const std::vector<std::uint16_t> bf16 = {0x0000, 0x3f80, 0xc000, 0x7f80, 0x0001, 0x3eab};
  EXPECT_EQ(decode(bf16.data(), 6, Format::bf16),
            (std::vector<double>{0, 1, -2, kInfinity, std::ldexp(1, -133), 0.333984375}));
  const std::vector<float> f32 = {0.1f, -3.5f};
  EXPECT_EQ(decode(f32.data(), 2, Format::f32), (std::vector<double>{double{0.1f}, -3.5}));
  const std::vector<std::uint16_t> nans = {0x7c01, 0xffff};
  for (double value : decode(nans.data(), 2, Format::f16)) EXPECT_TRUE(std::isnan(value));
  for (double value : decode(nans.data() + 1, 1, Format::bf16)) EXPECT_TRUE(std::isnan(value));
}

TEST(OracleDecode, HalfCodesAscendInEvenStepsWithinABinade) {
  std::vector<std::uint16_t> codes(0x7c00);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint16_t>(i);
  const std::vector<double> values = decode(codes.data(), 0x7c00, Format::f16);
  for (std::size_t i = 1; i < values.size(); ++i) {
    const int binade = std::max(0, static_cast<int>((i - 1) >> 10) - 1);
    ASSERT_EQ(values[i] - values[i - 1], std::ldexp(1, binade - 24)) << i;
  }
}

TEST(OracleAttention, TwoKeysByHand) {
  // Scores 0 and 2 * ln(3) / 2: weights 1/4 and 3/4.
  const std::vector<double> q = {2}, k = {0, std::log(3.0)}, v = {10, 20};
  const AttentionResult result = attention({.num_queries = 1,
                                            .num_keys = 2,
                                            .num_heads = 1,
                                            .num_kv_heads = 1,
                                            .qk_dim = 1,
                                            .v_dim = 1,
                                            .sm_scale = 0.5,
                                            .q = q,
                                            .k = k,
                                            .v = v});
  EXPECT_NEAR(result.out[0], 17.5, 1e-14);
  EXPECT_NEAR(result.lse[0], std::log(4.0), 1e-15);
}

TEST(OracleAttention, QueriesAreAlignedToTheLastKey) {
  // All scores equal: each row is the mean of the values it sees.
  const std::vector<double> q(3), k(4), v = {1, 2, 6, 7};
  Attention problem{.num_queries = 3,
                    .num_keys = 4,
                    .num_heads = 1,
                    .num_kv_heads = 1,
                    .qk_dim = 1,
                    .v_dim = 1,
                    .sm_scale = 1,
                    .q = q,
                    .k = k,
                    .v = v};
  AttentionResult result = attention(problem);
  EXPECT_NEAR(result.out[0], 1.5, 1e-15);
  EXPECT_NEAR(result.out[1], 3, 1e-15);
  EXPECT_NEAR(result.out[2], 4, 1e-15);
  EXPECT_NEAR(result.lse[1], std::log(3.0), 1e-15);
  problem.causal = false;
  for (double value : attention(problem).out) EXPECT_NEAR(value, 4, 1e-15);
}

TEST(OracleAttention, MoreQueriesThanKeysLeaveTheFirstRowsEmpty) {
  const std::vector<double> q(3), k(1), v = {5};
  const AttentionResult result = attention({.num_queries = 3,
                                            .num_keys = 1,
                                            .num_heads = 1,
                                            .num_kv_heads = 1,
                                            .qk_dim = 1,
                                            .v_dim = 1,
                                            .sm_scale = 1,
                                            .q = q,
                                            .k = k,
                                            .v = v});
  EXPECT_EQ(result.out, (std::vector<double>{0, 0, 5}));
  EXPECT_EQ(result.lse, (std::vector<double>{-kInfinity, -kInfinity, 0}));
}

TEST(OracleAttention, QueryHeadsShareKeyHeadsInOrder) {
  const std::vector<double> q = {1, 1, 1, 1}, k = {0, 0}, v = {3, 8};
  const AttentionResult result = attention({.num_queries = 1,
                                            .num_keys = 1,
                                            .num_heads = 4,
                                            .num_kv_heads = 2,
                                            .qk_dim = 1,
                                            .v_dim = 1,
                                            .sm_scale = 1,
                                            .q = q,
                                            .k = k,
                                            .v = v});
  EXPECT_EQ(result.out, (std::vector<double>{3, 3, 8, 8}));
}

TEST(OracleAttention, LseIsHeadMajor) {
  // 2 queries, 3 heads; head h of query i scores h + 10 i on the one visible key.
  const std::vector<double> q = {0, 1, 2, 10, 11, 12}, k = {1}, v = {1};
  const AttentionResult result = attention({.num_queries = 2,
                                            .num_keys = 1,
                                            .num_heads = 3,
                                            .num_kv_heads = 1,
                                            .qk_dim = 1,
                                            .v_dim = 1,
                                            .sm_scale = 1,
                                            .causal = false,
                                            .q = q,
                                            .k = k,
                                            .v = v});
  EXPECT_EQ(result.lse, (std::vector<double>{0, 10, 1, 11, 2, 12}));
}

TEST(OracleAttention, AVisibleNanComesThrough) {
  const std::vector<double> q = {1, 1}, k = {0, NAN}, v = {1, 2};
  const AttentionResult result = attention({.num_queries = 2,
                                            .num_keys = 2,
                                            .num_heads = 1,
                                            .num_kv_heads = 1,
                                            .qk_dim = 1,
                                            .v_dim = 1,
                                            .sm_scale = 1,
                                            .q = q,
                                            .k = k,
                                            .v = v});
  EXPECT_EQ(result.out[0], 1);
  EXPECT_TRUE(std::isnan(result.out[1]));
}

TEST(OracleAttention, WrongSizesAreNamed) {
  const std::vector<double> q(2), k(3), v(3);
  Attention problem{.num_queries = 2,
                    .num_keys = 3,
                    .num_heads = 1,
                    .num_kv_heads = 1,
                    .qk_dim = 1,
                    .v_dim = 1,
                    .sm_scale = 1,
                    .q = q,
                    .k = k,
                    .v = std::span(v).first(2)};
  try {
    attention(problem);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "v holds 2 values, needs 3");
  }
}

TEST(OracleMerge, PartsOfTheKeysMergeToTheWhole) {
  constexpr std::int64_t kQueries = 3, kKeys = 11, kHeads = 2, kQk = 5, kV = 4;
  const std::vector<double> q = normal(kQueries * kHeads * kQk, 1);
  const std::vector<double> k = normal(kKeys * kHeads * kQk, 2);
  const std::vector<double> v = normal(kKeys * kHeads * kV, 3);
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    return attention(
        {.num_queries = kQueries,
         .num_keys = end - begin,
         .num_heads = kHeads,
         .num_kv_heads = kHeads,
         .qk_dim = kQk,
         .v_dim = kV,
         .sm_scale = 0.7,
         .causal = false,
         .q = q,
         .k = std::span(k).subspan(static_cast<std::size_t>(begin * kHeads * kQk),
                                   static_cast<std::size_t>((end - begin) * kHeads * kQk)),
         .v = std::span(v).subspan(static_cast<std::size_t>(begin * kHeads * kV),
                                   static_cast<std::size_t>((end - begin) * kHeads * kV))});
  };
  const AttentionResult whole = part(0, kKeys);
  for (std::int64_t split = 0; split <= kKeys; ++split) {
    const AttentionResult merged =
        oracle::merge(part(0, split), part(split, kKeys), kHeads, kQueries, kV);
    for (std::size_t i = 0; i < whole.out.size(); ++i) {
      EXPECT_NEAR(merged.out[i], whole.out[i], 1e-14);
    }
    for (std::size_t i = 0; i < whole.lse.size(); ++i) {
      EXPECT_NEAR(merged.lse[i], whole.lse[i], 1e-14);
    }
  }
}

TEST(OracleMerge, EmptyPartsCarryNoWeight) {
  const AttentionResult empty{{NAN}, {-kInfinity}}, full{{7}, {-1e30}};
  EXPECT_EQ(oracle::merge(empty, full, 1, 1, 1).out[0], 7);
  EXPECT_EQ(oracle::merge(full, empty, 1, 1, 1).lse[0], -1e30);
  EXPECT_EQ(oracle::merge(empty, empty, 1, 1, 1).out[0], 0);
  EXPECT_EQ(oracle::merge(empty, empty, 1, 1, 1).lse[0], -kInfinity);
  const std::vector<double> sinks = {3};
  EXPECT_EQ(oracle::merge(empty, empty, 1, 1, 1, sinks).out[0], 0);
}

}  // namespace
}  // namespace fovea::oracle
