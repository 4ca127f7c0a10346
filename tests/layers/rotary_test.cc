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

struct ScalingCase {
  const char* name;
  RopeConfig config;
  oracle::Rotary expected;
};

std::vector<ScalingCase> scaling_cases() {
  std::vector<ScalingCase> cases;
  const auto add = [&](const char* name, RopeConfig config, std::int64_t max_position,
                       const auto& scaling, const oracle::Rotary& expected) {
    config.max_position = max_position;
    config.scaling = scaling;
    cases.push_back({name, config, expected});
  };
  RopeConfig llama = config_of(128, 64);
  llama.theta = 500000;
  RopeConfig gpt_oss = config_of(64, 64);
  gpt_oss.theta = 150000;
  const RopeConfig plain = config_of(64, 64);
  add("linear", plain, 64, LinearScaling{.factor = 8}, oracle::rotary_linear(64, 10000, false, 8));
  for (const std::int64_t length : {512, 2048, 2049, 8192}) {
    add("dynamic NTK", plain, length, DynamicNtkScaling{.factor = 4, .original_max_position = 2048},
        oracle::rotary_dynamic_ntk(64, 10000, false, 4, static_cast<double>(length), 2048));
  }
  add("llama 3.1", llama, 64,
      Llama3Scaling{
          .factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position = 8192},
      oracle::rotary_llama3(128, 500000, false,
                            {.factor = 8,
                             .low_freq_factor = 1,
                             .high_freq_factor = 4,
                             .original_max_position = 8192}));
  add("llama 3.2", llama, 64,
      Llama3Scaling{
          .factor = 32, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position = 8192},
      oracle::rotary_llama3(128, 500000, false,
                            {.factor = 32,
                             .low_freq_factor = 1,
                             .high_freq_factor = 4,
                             .original_max_position = 8192}));
  add("gpt-oss", gpt_oss, 64,
      YarnScaling{.factor = 32, .original_max_position = 4096, .truncate = false},
      oracle::rotary_yarn(64, 150000, false,
                          {.factor = 32, .original_max_position = 4096, .truncate = false}));
  add("YaRN with an amplitude of its own", plain, 64,
      YarnScaling{.factor = 16, .original_max_position = 4096, .attention_factor = 1.5},
      oracle::rotary_yarn(64, 10000, false,
                          {.factor = 16, .original_max_position = 4096, .attention_factor = 1.5}));
  return cases;
}

TEST(Rotary, ScalingsAgreeWithTheirFormulas) {
  for (const ScalingCase& scaling : scaling_cases()) {
    SCOPED_TRACE(scaling.name);
    const RotaryEmbedding rotary(scaling.config);
    const std::vector<double> got = rotary.inv_freq();
    ASSERT_EQ(got.size(), scaling.expected.inv_freq.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i] / scaling.expected.inv_freq[i], 1, 1e-12) << "pair " << i;
    }
    EXPECT_NEAR(rotary.amplitude(), scaling.expected.amplitude, 1e-15);
  }
}

TEST(Rotary, ScalingsByHand) {
  RopeConfig config = config_of(4, 64);
  config.theta = 100;
  config.scaling = LinearScaling{.factor = 4};
  EXPECT_NEAR(RotaryEmbedding(config).inv_freq()[1], 0.025, 1e-15);
  // theta * (2 * 64 / 32 - 1)^(4 / 2) = 900, whose square root is 30.
  config.scaling = DynamicNtkScaling{.factor = 2, .original_max_position = 32};
  EXPECT_NEAR(RotaryEmbedding(config).inv_freq()[1], 1. / 30, 1e-15);
  EXPECT_EQ(RotaryEmbedding(config).inv_freq()[0], 1);
  config.max_position = 32;
  EXPECT_NEAR(RotaryEmbedding(config).inv_freq()[1], 0.1, 1e-15);
  // Pair 0 turns 25.5 times within 160 positions and stays, pair 1 2.546 times: half way up.
  config.scaling = Llama3Scaling{
      .factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position = 160};
  const double kept = (16 / (2 * 3.14159265358979323846) - 1) / 3;
  EXPECT_EQ(RotaryEmbedding(config).inv_freq()[0], 1);
  EXPECT_NEAR(RotaryEmbedding(config).inv_freq()[1], 0.1 * kept + 0.0125 * (1 - kept), 1e-15);
  // gpt-oss: the ramp starts and ends between pairs.
  config = config_of(64, 2);
  config.theta = 150000;
  config.scaling = YarnScaling{.factor = 32, .original_max_position = 4096, .truncate = false};
  const RotaryEmbedding gpt_oss(config);
  const double low = 64 * std::log(4096 / (32 * 6.283185307179586)) / (2 * std::log(150000.));
  const double high = 64 * std::log(4096 / 6.283185307179586) / (2 * std::log(150000.));
  const double slow = (12 - low) / (high - low);
  EXPECT_NEAR(gpt_oss.inv_freq()[12] / std::pow(150000., -12. / 32), 1 - slow + slow / 32, 1e-12);
  EXPECT_NEAR(gpt_oss.amplitude(), 0.1 * std::log(32.) + 1, 1e-15);
}

TEST(Rotary, SectionsTurnByThreePositions) {
  constexpr std::int64_t kTokens = 3, kHeads = 2, kRope = 16;
  const Runtime runtime({.num_threads = 2});
  const std::vector<std::int32_t> positions = {5, 6, 7, 100, 200, 300, 9, 9, 4000};  // [3, T]
  for (const bool interleaved : {false, true}) {
    RopeConfig config = config_of(kRope, 4096);
    config.pairing = RopePairing::neox;
    config.sections = {.pairs = {4, 2, 2}, .interleaved = interleaved};
    const RotaryEmbedding rotary(config);
    const std::vector<int> axes = interleaved ? std::vector<int>{0, 1, 2, 0, 1, 2, 0, 0}
                                              : std::vector<int>{0, 0, 0, 0, 1, 1, 2, 2};
    std::vector<std::int64_t> pairs;
    for (std::size_t t = 0; t < 3; ++t) {
      for (const int axis : axes)
        pairs.push_back(positions[static_cast<std::size_t>(axis) * 3 + t]);
    }
    test::PaddedTensor x(DType::f32, {kTokens, kHeads, kRope});
    test::fill_normal(x, 4);
    std::vector<double> expected = test::to_doubles(x);
    oracle::rotate_pairs(expected, pairs, kHeads, oracle::rotary(kRope, 10000, false));
    rotary(runtime, x, TensorView::of(positions.data(), {3, kTokens}));
    EXPECT_TRUE(test::rows_close(expected, x, {1e-6, 0}));
  }
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
  config.scaling = LinearScaling{.factor = 0};
  EXPECT_EQ(error_of(config), "rope: linear factor is 0, but must be positive");
  config.scaling = DynamicNtkScaling{.factor = 2};
  EXPECT_EQ(error_of(config), "rope: dynamic NTK original_max_position is 0, but must be positive");
  config.scaling = Llama3Scaling{
      .factor = 8, .low_freq_factor = 4, .high_freq_factor = 4, .original_max_position = 8192};
  EXPECT_EQ(error_of(config),
            "rope: llama3 low_freq_factor is 4 and high_freq_factor is 4, but the first must be "
            "positive and the second above it");
  config.scaling = {};
  config.sections.pairs = {2, 1, 2};
  EXPECT_EQ(error_of(config),
            "rope: sections are 2, 1 and 2 channel pairs, but must add up to 4, half of dim");
}

}  // namespace
}  // namespace fovea
