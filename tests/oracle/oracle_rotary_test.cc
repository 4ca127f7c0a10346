// Rotary embedding and its scalings, by hand and by published numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <vector>

#include "fovea/oracle.h"

namespace fovea::oracle {
namespace {

double worst(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double result = 0;
  for (std::size_t i = 0; i < a.size(); ++i) result = std::max(result, std::abs(a[i] - b[i]));
  return result;
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

}  // namespace
}  // namespace fovea::oracle
