#include "fovea/rotary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/oracle.h"
#include "fovea/runtime.h"
#include "support/compare.h"

namespace fovea {
namespace {

RopeConfig config_of(std::int64_t dim, std::int64_t max_position) {
  RopeConfig config;
  config.dim = dim;
  config.max_position = max_position;
  return config;
}

YarnScaling deepseek_v2_yarn() {
  return {.factor = 40,
          .original_max_position = 4096,
          .beta_fast = 32,
          .beta_slow = 1,
          .mscale = 0.707,
          .mscale_all_dim = 0.707};
}

TEST(Rotary, PlainFrequenciesByHand) {
  RopeConfig config = config_of(8, 4);
  config.theta = 10000;
  const RotaryEmbedding rotary(config);
  const std::vector<double> expected = {1, 0.1, 0.01, 0.001};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(rotary.inv_freq()[i], expected[i], 1e-15);
  EXPECT_EQ(rotary.amplitude(), 1);
  EXPECT_EQ(*rotary.cos_sin().ptr<float>({0, 0}), 1.f);
  EXPECT_EQ(*rotary.cos_sin().ptr<float>({0, 4}), 0.f);
  EXPECT_EQ(*rotary.cos_sin().ptr<float>({3, 1}), static_cast<float>(std::cos(0.3)));
  EXPECT_EQ(*rotary.cos_sin().ptr<float>({3, 5}), static_cast<float>(std::sin(0.3)));
}

TEST(Rotary, YarnOfDeepSeekV2) {
  // 32 turns within 4096 positions at channel pair 10.47, one turn at 22.51: pairs up to 10 keep
  // their frequency, from 23 on it is divided by 40, with a ramp of 13 steps in between.
  RopeConfig config = config_of(64, 2);
  config.scaling = deepseek_v2_yarn();
  const std::vector<double> got = RotaryEmbedding(config).inv_freq();
  const auto plain = [](double i) { return std::pow(10000.0, -i / 32); };
  EXPECT_NEAR(got[0], 1, 1e-15);
  EXPECT_NEAR(got[10] / plain(10), 1, 1e-14);
  EXPECT_NEAR(got[11] / plain(11), 12.0 / 13 + 1.0 / 13 / 40, 1e-14);
  EXPECT_NEAR(got[22] / plain(22), 1.0 / 13 + 12.0 / 13 / 40, 1e-14);
  EXPECT_NEAR(got[23] / plain(23), 1.0 / 40, 1e-15);
  EXPECT_NEAR(got[31] / plain(31), 1.0 / 40, 1e-15);
}

TEST(Rotary, YarnAmplitudeAndSoftmaxScaleAreTwoFactors) {
  // Equal mscales cancel in the amplitude and stay in the softmax scale.
  RopeConfig config = config_of(64, 8);
  config.scaling = deepseek_v2_yarn();
  EXPECT_EQ(RotaryEmbedding(config).amplitude(), 1);
  EXPECT_NEAR(std::pow(yarn_mscale(40, 0.707), 2), 1.58963, 5e-6);
  EXPECT_NEAR(yarn_mscale(40, 1), 1.36889, 5e-6);
  EXPECT_NEAR(1 / std::pow(yarn_mscale(40, 1), 2), 0.53366, 5e-6);
  EXPECT_NEAR(std::pow(yarn_mscale(40, 1), 2) / std::sqrt(192.0), 0.135234, 5e-7);
  EXPECT_NEAR(std::pow(yarn_mscale(40, 0.707), 2) / std::sqrt(192.0), 0.114721, 5e-7);
  EXPECT_EQ(yarn_mscale(40, 0), 1);
  EXPECT_EQ(yarn_mscale(0.5, 1), 1);

  std::get<YarnScaling>(config.scaling).mscale = 1;
  std::get<YarnScaling>(config.scaling).mscale_all_dim = 0.5;
  const RotaryEmbedding amplified(config);
  const double amplitude = (0.1 * std::log(40) + 1) / (0.05 * std::log(40) + 1);
  EXPECT_NEAR(amplified.amplitude(), amplitude, 1e-15);
  EXPECT_EQ(*amplified.cos_sin().ptr<float>({0, 0}), static_cast<float>(amplitude));
}

TEST(Rotary, YarnWithCoincidingBoundsIsAStep) {
  RopeConfig config = config_of(8, 2);
  config.theta = 10;
  YarnScaling yarn = deepseek_v2_yarn();
  yarn.beta_fast = yarn.beta_slow = 869;  // Pair -0.5: both bounds become 0.
  config.scaling = yarn;
  const std::vector<double> got = RotaryEmbedding(config).inv_freq();
  EXPECT_NEAR(got[0], 1, 1e-12);
  EXPECT_NEAR(got[1], std::pow(10, -0.25) / 40, 1e-12);
}

TEST(Rotary, LongRopeTakesTheDivisorsOfItsTable) {
  LongRopeScaling longrope;
  longrope.short_factor = {1, 2};
  longrope.long_factor = {4, 8};
  longrope.original_max_position = 32;
  RopeConfig config = config_of(4, 32);
  config.theta = 100;
  config.scaling = longrope;
  const RotaryEmbedding within(config);
  EXPECT_NEAR(within.inv_freq()[0], 1, 1e-15);
  EXPECT_NEAR(within.inv_freq()[1], 0.05, 1e-15);
  EXPECT_EQ(within.amplitude(), 1);
  config.max_position = 1024;
  const RotaryEmbedding beyond(config);
  EXPECT_NEAR(beyond.inv_freq()[0], 0.25, 1e-15);
  EXPECT_NEAR(beyond.inv_freq()[1], 0.0125, 1e-15);
  EXPECT_NEAR(beyond.amplitude(), std::sqrt(2.0), 1e-15);  // ln 32 / ln 32 more than 1.
  // A table shorter than the model's positions keeps the model's amplitude.
  std::get<LongRopeScaling>(config.scaling).max_position = 1024;
  config.max_position = 16;
  EXPECT_NEAR(RotaryEmbedding(config).amplitude(), std::sqrt(2.0), 1e-15);
  EXPECT_NEAR(RotaryEmbedding(config).inv_freq()[1], 0.05, 1e-15);
}

TEST(Rotary, TurnsAStridedViewInPlace) {
  // The rope columns of a query [T, N, P + R]: the others keep their bits.
  constexpr std::int64_t kTokens = 5, kHeads = 3, kNope = 6, kRope = 8;
  const Runtime runtime({.num_threads = 2});
  for (RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    RopeConfig config = config_of(kRope, 4096);
    config.scaling = deepseek_v2_yarn();
    std::get<YarnScaling>(config.scaling).mscale = 1;
    config.pairing = pairing;
    const RotaryEmbedding rotary(config);
    test::PaddedTensor q(DType::f32, {kTokens, kHeads, kNope + kRope});
    test::fill_normal(q, 1);
    const std::vector<double> before = test::to_doubles(q.view().slice(2, 0, kNope));
    std::vector<double> expected = test::to_doubles(q.view().slice(2, kNope, kNope + kRope));
    const std::vector<std::int64_t> positions = {0, 1, 4095, 77, 1};
    oracle::rotate(
        expected, positions, kHeads,
        oracle::rotary_yarn(
            kRope, 10000, pairing == RopePairing::interleaved,
            {.factor = 40, .original_max_position = 4096, .mscale = 1, .mscale_all_dim = 0.707}));
    rotary(runtime, q.view().slice(2, kNope, kNope + kRope),
           TensorView::of(positions.data(), {1, kTokens}));
    EXPECT_TRUE(test::rows_close(expected, q.view().slice(2, kNope, kNope + kRope), {1e-6, 0}));
    EXPECT_EQ(test::to_doubles(q.view().slice(2, 0, kNope)), before);
    EXPECT_TRUE(q.padding_untouched());
  }
}

TEST(Rotary, ErrorsNameTheField) {
  const auto error_of = [](RopeConfig config) -> std::string {
    try {
      const RotaryEmbedding rotary(config);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_EQ(error_of(config_of(7, 4)), "rope: dim is 7, but must be positive and even");
  EXPECT_EQ(error_of(config_of(8, 0)), "rope: max_position is 0, but must be positive");
  RopeConfig config = config_of(8, 4);
  config.theta = 1;
  EXPECT_EQ(error_of(config), "rope: theta is 1, but must be above 1");
  config.theta = 10000;
  config.scaling = YarnScaling{.factor = 0};
  EXPECT_EQ(error_of(config), "rope: YaRN factor is 0, but must be positive");
  LongRopeScaling longrope;
  longrope.short_factor = {1, 1, 1};
  config.scaling = longrope;
  EXPECT_EQ(error_of(config),
            "rope: LongRoPE short_factor has 3 entries, but must have 4, half of dim");
}

}  // namespace
}  // namespace fovea
