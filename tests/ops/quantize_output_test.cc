// Quantised outputs: every kind's bytes by their definition, padding, and what is refused.
#include <cmath>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "ops/backend_test.h"

namespace fovea::test {
namespace {

double e4m3(std::uint8_t bits) { return oracle::decode(&bits, 1, oracle::Format::f8e4m3fn)[0]; }

/// Value of a 4-bit code: sign, two bits of exponent, one of fraction.
double e2m1(int code) {
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8 ? -1 : 1) * kMagnitudes[code & 7];
}

/// `got` is the code value nearest to x: no other code of the format is nearer.
template <class Decode>
::testing::AssertionResult is_nearest(double x, double got, int num_codes, Decode&& decode) {
  for (int code = 0; code < num_codes; ++code) {
    const double other = decode(code);
    // A quotient in float32 may fall on the other side of a tie.
    if (!std::isnan(other) && std::abs(other - x) < std::abs(got - x) * (1 - 1e-5)) {
      return ::testing::AssertionFailure() << x << " became " << got << ", nearer is " << other;
    }
  }
  return ::testing::AssertionSuccess();
}

class QuantizeOutput : public BackendTest {
 protected:
  static constexpr std::int64_t kTokens = 5, kActual = 3;

  /// Normal rows with an outlier, a row of zeros.
  PaddedTensor make_x(std::int64_t width) const {
    PaddedTensor x(dtype(), {kActual, width});
    fill_normal(x, 3, 4);
    fill_normal(x.view().slice(0, 0, 1).slice(1, 5, 6), 4, 1000);
    fill_normal(x.view().slice(0, 2, 3), 5, 0);
    return x;
  }
};
FOVEA_FOR_EACH_BACKEND(QuantizeOutput);

TEST_P(QuantizeOutput, OneScaleForAllRowsSaturates) {  // F182, F352
  constexpr std::int64_t kWidth = 1044;
  const PaddedTensor x = make_x(kWidth), out(DType::f8e4m3fn, {kTokens, kWidth});
  for (const bool inverse : {false, true}) {
    poison(out);
    QuantizedOutput output{.out = out, .block_scale = {}};
    (inverse ? output.inv_scale : output.scale) = inverse ? 4.f : 0.25f;
    quantize_output(ctx(), {x, output});
    const std::vector<double> values = to_doubles(x);
    for (std::int64_t t = 0; t < kActual; ++t) {
      for (std::int64_t d = 0; d < kWidth; ++d) {
        const double value = values[static_cast<std::size_t>(t * kWidth + d)];
        const double code = e4m3(*out.view().ptr<std::uint8_t>({t, d}));
        EXPECT_TRUE(is_nearest(value / 0.25, code, 256,
                               [](int c) { return e4m3(static_cast<std::uint8_t>(c)); }));
      }
    }
    EXPECT_TRUE(all_zero(out.view().slice(0, kActual, kTokens)));
    EXPECT_TRUE(out.padding_untouched());
  }
}

TEST_P(QuantizeOutput, GroupsHaveTheirOwnScales) {  // F181
  constexpr std::int64_t kWidth = 1152;
  const PaddedTensor x = make_x(kWidth), out(DType::f8e4m3fn, {kTokens, kWidth});
  const std::vector<double> values = to_doubles(x);
  for (const std::int64_t group : {64, 128}) {
    for (const bool power_of_two : {false, true}) {
      for (const bool column_major : {false, true}) {
        const std::int64_t groups = kWidth / group;
        const auto strides = tma_aligned_strides(kTokens, DType::f32);
        EXPECT_EQ((std::array<std::int64_t, 2>{1, 8}), strides);
        const PaddedTensor memory(
            DType::f32, column_major ? std::initializer_list<std::int64_t>{groups, 8}
                                     : std::initializer_list<std::int64_t>{kTokens, groups});
        const TensorView scales =
            column_major ? memory.view().slice(1, 0, kTokens).transpose(0, 1) : memory.view();
        poison(memory);
        poison(out);
        quantize_output(
            ctx(), {x, {.out = out, .block_scale = scales, .power_of_two_scales = power_of_two}});
        for (std::int64_t t = 0; t < kActual; ++t) {
          for (std::int64_t g = 0; g < groups; ++g) {
            double amax = 1e-10;
            for (std::int64_t d = g * group; d < (g + 1) * group; ++d) {
              amax = std::max(amax, std::abs(values[static_cast<std::size_t>(t * kWidth + d)]));
            }
            double scale = amax / 448;
            if (power_of_two) scale = std::exp2(std::ceil(std::log2(scale)));
            const double stored = *scales.ptr<float>({t, g});
            EXPECT_NEAR(scale, stored, scale * 1e-6);
            for (std::int64_t d = g * group; d < (g + 1) * group; ++d) {
              const double value = values[static_cast<std::size_t>(t * kWidth + d)];
              const double code = e4m3(*out.view().ptr<std::uint8_t>({t, d}));
              EXPECT_NEAR(value / stored, code, std::abs(code) / 16 + 0x1p-10);
            }
          }
        }
        EXPECT_TRUE(all_zero(scales.slice(0, kActual, kTokens)));
        EXPECT_TRUE(all_zero(out.view().slice(0, kActual, kTokens)));
      }
    }
  }
}

TEST_P(QuantizeOutput, ScalesMayBeStoredAsExponents) {
  const PaddedTensor x = make_x(128), out(DType::f8e4m3fn, {kTokens, 128});
  const PaddedTensor floats(DType::f32, {kTokens, 1}), exponents(DType::f8e8m0, {kTokens, 1});
  for (const PaddedTensor* scales : {&floats, &exponents}) {
    quantize_output(ctx(),
                    {x, {.out = out, .block_scale = *scales, .power_of_two_scales = true}});
  }
  for (std::int64_t t = 0; t < kActual; ++t) {
    EXPECT_EQ(*floats.view().ptr<float>({t, 0}),
              std::ldexp(1.f, *exponents.view().ptr<std::uint8_t>({t, 0}) - 127));
  }
}

TEST_P(QuantizeOutput, Nvfp4ScalesLieInTilesAndPaddingIsZero) {  // F180
  constexpr std::int64_t kWidth = 1120, kGroups = 70, kPadded = 72;
  constexpr std::int64_t kRows = 130, kRead = 129;               // Padded to 256.
  const PaddedTensor x(dtype(), {kRead, kWidth});
  fill_normal(x, 3);
  const PaddedTensor out(DType::u8, {kRows, kWidth / 2});
  const Tensor scales = Tensor::empty(DType::f8e4m3fn, {256, kPadded});
  const float scale = 0.0019f;  // About amax / (448 * 6), as calibration finds it.
  for (const bool inverse : {false, true}) {
    poison(out);
    poison_bytes(scales.view().data, 256 * kPadded);
    QuantizedOutput output{.out = out, .block_scale = scales};
    (inverse ? output.inv_scale : output.scale) = inverse ? 1 / scale : scale;
    quantize_output(ctx(), {x, output});
    const std::vector<double> values = to_doubles(x);
    const auto* bytes = static_cast<const std::uint8_t*>(scales.view().data);
    for (std::int64_t t = 0; t < 256; ++t) {
      for (std::int64_t g = 0; g < kPadded; ++g) {
        // [row tile][group tile][row % 32][row / 32 % 4][group % 4].
        const std::int64_t at =
            (((t / 128 * (kPadded / 4) + g / 4) * 32 + t % 32) * 4 + t / 32 % 4) * 4 + g % 4;
        if (t >= kRead || g >= kGroups) {
          EXPECT_EQ(0, bytes[at]) << t << ", " << g;
          continue;
        }
        double amax = 0;
        for (std::int64_t d = 16 * g; d < 16 * (g + 1); ++d) {
          amax = std::max(amax, std::abs(values[static_cast<std::size_t>(t * kWidth + d)]));
        }
        const double stored = e4m3(bytes[at]);
        EXPECT_NEAR(amax / 6 / static_cast<double>(scale), stored, stored / 15);
        for (std::int64_t d = 16 * g; d < 16 * (g + 1); ++d) {
          const int byte = *out.view().ptr<std::uint8_t>({t, d / 2});
          const double code = e2m1(d % 2 == 0 ? byte & 15 : byte >> 4);
          const double value = values[static_cast<std::size_t>(t * kWidth + d)];
          EXPECT_TRUE(is_nearest(value / (stored * static_cast<double>(scale)), code, 16, e2m1));
        }
      }
    }
    EXPECT_TRUE(all_zero(out.view().slice(0, kRead, kRows)));
  }
}

/// Scales are honoured far below 1, where FP8 itself has next to no codes.
TEST_P(QuantizeOutput, SmallOutputsKeepTheirPrecision) {  // B136
  constexpr std::int64_t kWidth = 128;
  const PaddedTensor x(dtype(), {1, kWidth}), fp8(DType::f8e4m3fn, {1, kWidth});
  fill_normal(x, 3, 1e-3);
  const std::vector<double> values = to_doubles(x);
  const PaddedTensor group(DType::f32, {1, 1}), fp4(DType::u8, {1, kWidth / 2});
  const Tensor tiles = Tensor::empty(DType::f8e4m3fn, {128, 8});
  const float amax = 4e-3f;
  const QuantizedOutput outputs[] = {{.out = fp8, .block_scale = {}, .scale = amax / 448},
                                     {.out = fp8, .block_scale = {}, .inv_scale = 448 / amax},
                                     {.out = fp8, .block_scale = group},
                                     {.out = fp4, .block_scale = tiles, .scale = amax / 448 / 6}};
  for (const QuantizedOutput& output : outputs) {
    quantize_output(ctx(), {x, output});
    const bool is_fp4 = output.out.dtype == DType::u8;
    double error = 0, norm = 0;
    for (std::int64_t d = 0; d < kWidth; ++d) {
      double scale = static_cast<double>(output.scale);
      if (output.inv_scale > 0) scale = 1 / static_cast<double>(output.inv_scale);
      if (output.block_scale.dtype == DType::f32 && output.block_scale) {
        scale = static_cast<double>(*group.view().ptr<float>({0, 0}));
      }
      const int byte = *output.out.ptr<std::uint8_t>({0, is_fp4 ? d / 2 : d});
      double code = is_fp4 ? 0 : e4m3(static_cast<std::uint8_t>(byte));
      if (is_fp4) {
        // The first row of the first tiles, four groups each.
        const std::int64_t g = d / 16;
        const auto* scales = static_cast<const std::uint8_t*>(tiles.view().data);
        code = e2m1(d % 2 == 0 ? byte & 15 : byte >> 4) * e4m3(scales[g / 4 * 512 + g % 4]);
      }
      const double value = values[static_cast<std::size_t>(d)];
      error += (code * scale - value) * (code * scale - value);
      norm += value * value;
    }
    EXPECT_LT(std::sqrt(error / norm), is_fp4 ? 0.15 : 0.04);
  }
}

TEST_P(QuantizeOutput, ANaNStaysVisible) {
  const PaddedTensor x(dtype(), {1, 128}), fp8(DType::f8e4m3fn, {1, 128}), fp4(DType::u8, {1, 64});
  fill_normal(x, 3);
  fill_normal(x.view().slice(1, 7, 8), 3, std::nan(""));
  quantize_output(ctx(), {x, {.out = fp8, .block_scale = {}, .scale = 1.f}});
  EXPECT_TRUE(std::isnan(e4m3(*fp8.view().ptr<std::uint8_t>({0, 7}))));
  const PaddedTensor group(DType::f32, {1, 1});
  quantize_output(ctx(), {x, {.out = fp8, .block_scale = group}});
  EXPECT_TRUE(std::isnan(*group.view().ptr<float>({0, 0})));
  const Tensor scales = Tensor::empty(DType::f8e4m3fn, {128, 8});
  quantize_output(ctx(), {x, {.out = fp4, .block_scale = scales, .scale = 0.01f}});
  EXPECT_TRUE(std::isnan(e4m3(static_cast<const std::uint8_t*>(scales.view().data)[0])));
}

TEST_P(QuantizeOutput, AnInfinitySaturatesAndLeavesItsGroupAlone) {
  const PaddedTensor x(dtype(), {1, 128}), with(DType::f8e4m3fn, {1, 128});
  const PaddedTensor without(DType::f8e4m3fn, {1, 128}), scale(DType::f32, {1, 1});
  fill_normal(x, 3);
  fill_normal(x.view().slice(1, 7, 8), 3, 0);
  quantize_output(ctx(), {x, {.out = without, .block_scale = scale}});
  const float expected = *scale.view().ptr<float>({0, 0});
  assign(x.view().slice(1, 7, 8), std::vector<double>{std::numeric_limits<double>::infinity()});
  quantize_output(ctx(), {x, {.out = with, .block_scale = scale}});
  EXPECT_EQ(expected, *scale.view().ptr<float>({0, 0}));
  for (std::int64_t d = 0; d < 128; ++d) {
    const double got = e4m3(*with.view().ptr<std::uint8_t>({0, d}));
    EXPECT_EQ(d == 7 ? 448 : e4m3(*without.view().ptr<std::uint8_t>({0, d})), got) << d;
  }
}

/// F172 to F176: which kind an output is, and every way to be none.
TEST(OutputQuantOf, TheTable) {
  const Tensor fp8 = Tensor::zeros(DType::f8e4m3fn, {2, 256});
  const Tensor fp4 = Tensor::zeros(DType::u8, {2, 128});
  const Tensor two = Tensor::zeros(DType::f32, {2, 2}), four = Tensor::zeros(DType::f32, {2, 4});
  const Tensor seventeen = Tensor::zeros(DType::f32, {2, 17});
  const Tensor tiles = Tensor::zeros(DType::f8e4m3fn, {128, 16});
  const Tensor exponents = Tensor::zeros(DType::f8e8m0, {2, 2});
  EXPECT_EQ(OutputQuant::fp8_per_tensor,
            output_quant_of({.out = fp8, .block_scale = {}, .scale = 2.f}, 256));
  EXPECT_EQ(OutputQuant::fp8_per_tensor,
            output_quant_of({.out = fp8, .block_scale = {}, .inv_scale = 2.f}, 256));
  EXPECT_EQ(OutputQuant::fp8_per_group, output_quant_of({.out = fp8, .block_scale = two}, 256));
  EXPECT_EQ(OutputQuant::fp8_per_group, output_quant_of({.out = fp8, .block_scale = four}, 256));
  EXPECT_EQ(OutputQuant::nvfp4,
            output_quant_of({.out = fp4, .block_scale = tiles, .inv_scale = 9.f}, 256));

  const auto refused = [](std::vector<std::string> parts, const QuantizedOutput& output,
                          std::int64_t output_dim = 256) {
    expect_error(ErrorCode::invalid_argument, parts, [&] { output_quant_of(output, output_dim); });
  };
  refused({"neither block_scale nor scale"}, {.out = fp8, .block_scale = {}});
  refused({"scale is 1 and inv_scale 2", "at most one"},
          {.out = fp8, .block_scale = {}, .scale = 1.f, .inv_scale = 2.f});
  refused({"inv_scale is -1"}, {.out = fp8, .block_scale = {}, .inv_scale = -1.f});
  refused({"inv_scale is 1e-39", "inverse must be finite"},
          {.out = fp8, .block_scale = {}, .inv_scale = 1e-39f});
  EXPECT_EQ(OutputQuant::fp8_per_tensor,
            output_quant_of({.out = fp8, .block_scale = {}, .scale = 1e-39f}, 256));
  refused({"each group has its own"}, {.out = fp8, .block_scale = two, .scale = 1.f});
  refused({"17 groups for output_dim = 2048"}, {.out = fp8, .block_scale = seventeen}, 2048);
  refused({"2 groups for output_dim = 257"}, {.out = fp8, .block_scale = two}, 257);
  refused({"2 groups for output_dim = 192"}, {.out = fp8, .block_scale = two}, 192);
  refused({"f8e8m0", "without power_of_two_scales"}, {.out = fp8, .block_scale = exponents});
  refused({"mxfp4"}, {.out = fp4, .block_scale = tiles});
  refused({"multiple of 16"}, {.out = fp4, .block_scale = tiles, .scale = 1.f}, 250);
  refused({"u8 with block_scale of f32"}, {.out = fp4, .block_scale = two, .scale = 1.f});
}

TEST_P(QuantizeOutput, OperandsThatDoNotFitAreNamed) {
  const PaddedTensor x(dtype(), {2, 128}), out(DType::f8e4m3fn, {2, 128});
  const auto refused = [&](std::vector<std::string> parts, const QuantizeOutputParams& params) {
    poison(out);
    expect_error(ErrorCode::invalid_argument, parts, [&] { quantize_output(ctx(), params); });
    EXPECT_TRUE(still_poisoned(out.view().data, 128));
  };
  const QuantizedOutput fits{.out = out, .block_scale = {}, .scale = 1.f};
  const PaddedTensor longer(dtype(), {3, 128});
  refused({"x is", "at most the 2 rows of out"}, {longer, fits});
  refused({"out is", "[T, D]"},
          {x, {.out = out.view().slice(1, 0, 64), .block_scale = {}, .scale = 1.f}});
  const Tensor scales = Tensor::zeros(DType::f32, {3, 1});
  refused({"block_scale is", "[T, groups]"}, {x, {.out = out, .block_scale = scales}});
}

}  // namespace
}  // namespace fovea::test
