// Formats byte for byte: against an encoder of another language, and over all codes.
#include "fovea/kv_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

#include "fovea/error.h"
#include "fovea/oracle.h"
#include "fovea/paged_kv_cache.h"
#include "support/poison.h"

namespace fovea {
namespace {

std::vector<std::byte> bytes_of_hex(const std::string& hex) {
  std::vector<std::byte> bytes(hex.size() / 2);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  return bytes;
}

std::vector<std::byte> encoded(const KvFormat& format, const std::vector<float>& values) {
  std::vector<std::byte> row(static_cast<std::size_t>(format.row_bytes()), std::byte{0xff});
  encode_row(format, values, row);
  return row;
}

std::vector<float> decoded(const KvFormat& format, const std::vector<std::byte>& row) {
  std::vector<float> values(static_cast<std::size_t>(format.row_elements));
  decode_row(format, row, values);
  return values;
}

TEST(KvFormat, RowsHaveTheGoldenBytes) {
  std::ifstream file(FOVEA_TEST_DATA "/golden/kv_formats.txt");
  std::string line;
  int rows = 0;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string name, values_hex, row_hex;
    KvFormat format;
    std::int64_t heads, first_group;
    float scale;
    bool power_of_two;
    fields >> name >> heads >> first_group >> scale >> power_of_two >> values_hex >> row_hex;
    const std::vector<std::byte> raw = bytes_of_hex(values_hex);
    std::vector<float> values(raw.size() / sizeof(float));
    std::memcpy(values.data(), raw.data(), raw.size());
    const auto count = static_cast<std::int64_t>(values.size());
    if (name == "fp8_ds_mla") {
      format = latent_format(name, 512, 64);
    } else {
      format = heads_format(name, heads, count / heads, scale);
      format.first_group = first_group;
    }
    format.power_of_two_scales = power_of_two;
    ++rows;
    EXPECT_EQ(bytes_of_hex(row_hex), encoded(format, values)) << "line " << rows << ", " << name;
  }
  EXPECT_EQ(50, rows);
}

TEST(KvFormat, BytesPerTokenOfALatentOf576) {
  const auto bytes = [](const char* name) { return latent_format(name, 512, 64).row_bytes(); };
  EXPECT_EQ(1152, bytes("bf16"));
  EXPECT_EQ(1152, bytes("f16"));
  EXPECT_EQ(2304, bytes("f32"));
  EXPECT_EQ(576, bytes("fp8_e4m3"));
  EXPECT_EQ(576, bytes("fp8_e5m2"));
  EXPECT_EQ(656, bytes("fp8_ds_mla"));
  EXPECT_EQ(584, bytes("int8_per_token"));
  EXPECT_EQ(584, bytes("fp8_per_token"));
  EXPECT_EQ(296, bytes("int4_per_token"));
  EXPECT_EQ(328, latent_format("int8_per_token", 256, 64).row_bytes());
  EXPECT_EQ(168, latent_format("int4_per_token", 256, 64).row_bytes());
  EXPECT_EQ(8 * (128 + 8), heads_format("fp8_per_token", 8, 128).row_bytes());
}

TEST(KvFormat, NamesComeBack) {
  for (const std::string_view name : kv_format_names()) {
    EXPECT_EQ(name, latent_format(name, 512, 64).name());
  }
}

/// Every 8-bit code in a row, under any scale.
TEST(KvFormat, EveryCodeOfAByteDecodesAsTheOracleSays) {
  const struct {
    const char* name;
    oracle::Format format;
  } kinds[] = {{"fp8_e4m3", oracle::Format::f8e4m3fn},
               {"fp8_e5m2", oracle::Format::f8e5m2},
               {"int8_per_token", oracle::Format::i8},
               {"fp8_per_token", oracle::Format::f8e4m3fn},
               {"int4_per_token", oracle::Format::i4}};
  for (const auto& kind : kinds) {
    const std::int64_t elements = kind.format == oracle::Format::i4 ? 512 : 256;
    const KvFormat format = heads_format(kind.name, 1, elements, 0.75f);
    std::vector<std::byte> row(static_cast<std::size_t>(format.row_bytes()));
    for (std::size_t code = 0; code < 256; ++code) row[code] = static_cast<std::byte>(code);
    const bool inline_scales = format.scales == KvScales::per_token;
    const float scales[2] = {0.375f, 3e-30f};
    if (inline_scales) std::memcpy(row.data() + 256, scales, sizeof scales);
    const std::vector<double> expected = oracle::decode_row(
        row.data(), elements,
        {.format = kind.format,
         .scales = inline_scales ? oracle::RowScales::per_token : oracle::RowScales::per_tensor,
         .first_group = format.first_group,
         .scale = 0.75});
    const std::vector<float> got = decoded(format, row);
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(expected[i])) {
        EXPECT_TRUE(std::isnan(got[i])) << kind.name << " element " << i;
      } else {
        EXPECT_EQ(static_cast<float>(expected[i]), got[i]) << kind.name << " element " << i;
      }
    }
  }
}

/// What is stored comes back within half a step of its group's scale, and stored again unchanged.
TEST(KvFormat, RoundTripIsWithinHalfAStep) {
  for (const std::string_view name : kv_format_names()) {
    for (const double magnitude : {1.0, 1e-39, 1e-20, 2e37}) {
      const KvFormat format = latent_format(name, 512, 64);
      // One scale for all tensors cannot reach every magnitude, and f16 cannot either.
      if (magnitude != 1.0 && format.scales != KvScales::per_token) continue;
      std::vector<float> values(576);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(magnitude * test::random_normal(3, i));
      }
      const std::vector<float> got = decoded(format, encoded(format, values));
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto group = i < 512 ? std::pair{0, 512} : std::pair{512, 576};
        float amax = 0;
        for (int j = group.first; j < group.second; ++j) {
          amax = std::max(amax, std::abs(values[static_cast<std::size_t>(j)]));
        }
        // Steps: of integers amax / 127 or / 7; of e4m3 2^-3, of e5m2 2^-2 of the value or, below
        // the normal numbers, of the smallest.
        double step = 0;
        if (format.dtype == DType::i8) step = std::max(amax / 127.0, 1.2e-38);
        if (format.dtype == DType::i4) step = std::max(amax / 7.0, 1.2e-38);
        if (format.dtype == DType::f8e4m3fn) {
          const bool whole = format.scales == KvScales::per_tensor;
          const double scale = whole ? 1.0 : std::max(amax / 448.0, 1.2e-38);
          step = std::max(std::abs(values[i]) / 8.0, scale * 0x1p-9);
        }
        if (format.dtype == DType::f8e5m2) step = std::max(std::abs(values[i]) / 4.0, 0x1p-16);
        if (is_compute_dtype(format.dtype)) step = std::abs(values[i]) * 0x1p-7 + 0x1p-24;
        EXPECT_NEAR(values[i], got[i], step / 2 * 1.0001) << name << " channel " << i;
      }
      if (format.scales != KvScales::none) {
        EXPECT_EQ(got, decoded(format, encoded(format, got))) << name << " x " << magnitude;
      }
    }
  }
}

/// No zero in a group, as a scale of its range would have it, and heads of no power of two.
TEST(KvFormat, ValuesFarFromZeroAreWithinHalfAStepOfTheirLargest) {  // B132
  for (const std::string_view name : kv_format_names()) {
    if (name == "fp8_ds_mla") continue;
    const KvFormat format = heads_format(name, 2, 96);
    std::vector<float> values(192);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(5 + test::random_unit(3, i));
    }
    const std::vector<float> got = decoded(format, encoded(format, values));
    // Half a step: of integers 6 / 127 or 6 / 7, of floats between 4 and 8 the mantissa's.
    double half = 0x1p-6;  // Of bf16 between 4 and 8.
    if (format.dtype == DType::i8) half = 3.0 / 127;
    if (format.dtype == DType::i4) half = 3.0 / 7;
    if (format.dtype == DType::f8e4m3fn) half = 0.25;
    if (format.dtype == DType::f8e5m2) half = 0.5;
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_NEAR(values[i], got[i], half * 1.0001) << name << " channel " << i;
    }
  }
}

TEST(KvFormat, ANaNStaysVisible) {
  for (const std::string_view name : kv_format_names()) {
    const KvFormat format = latent_format(name, 512, 64);
    std::vector<float> values(576, 1.f);
    values[200] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(decoded(format, encoded(format, values))[200])) << name;
  }
}

TEST(KvFormat, LargeValuesSaturate) {
  for (const char* name : {"fp8_e4m3", "fp8_e5m2"}) {
    const KvFormat format = latent_format(name, 512, 64);
    std::vector<float> values(576, 1e6f);
    values[1] = -std::numeric_limits<float>::infinity();
    const std::vector<float> got = decoded(format, encoded(format, values));
    const float largest = format.dtype == DType::f8e4m3fn ? 448.f : 57344.f;
    EXPECT_EQ(largest, got[0]) << name;
    EXPECT_EQ(-largest, got[1]) << name;
  }
}

/// The message of the error that `fn` throws.
template <class F>
std::string error_of(F&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(KvFormat, WhatAFormatCannotHoldIsRefusedByName) {
  const auto latent = [](const char* name, std::int64_t l, std::int64_t r,
                         KvScalePair scales = {}) {
    return error_of([&] { latent_format(name, l, r, scales); });
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos
               ? ::testing::AssertionSuccess()
               : ::testing::AssertionFailure() << '"' << text << "\" lacks \"" << part << '"';
  };
  EXPECT_TRUE(has(latent("fp8", 512, 64), "KV format is fp8, but must be one of bf16, f16"));
  EXPECT_TRUE(has(latent("fp8_e4m3fnuz", 512, 64), "must be fp8_e4m3: with another bias"));
  EXPECT_TRUE(has(latent("fp8_e4m3", 512, 64, {0.5f, 0.25f}), "k_scale is 0.5 and v_scale 0.25"));
  EXPECT_TRUE(has(latent("fp8_ds_mla", 256, 64), "fp8_ds_mla has 512 + 64"));
  EXPECT_TRUE(has(latent("fp8_ds_mla", 448, 128), "kv_lora_rank is 448"));
  EXPECT_TRUE(has(latent("int4_per_token", 511, 64), "with i4 both must be even"));
  EXPECT_TRUE(has(latent("int8_per_token", 4096, 64), "may have 2048 with scales"));
  EXPECT_TRUE(has(error_of([] { heads_format("fp8_ds_mla", 8, 72); }), "it is a latent row"));
  EXPECT_TRUE(has(error_of([] { heads_format("fp8_e4m3", 8, 128, -1.f); }), "format.scale is -1"));
  EXPECT_TRUE(has(latent("bf16", 600, -24), "qk_rope_head_dim is -24, but must be in [0, "));
  EXPECT_TRUE(has(latent("bf16", 0, 64), "kv_lora_rank is 0, but must be in [1, "));
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;  // Its square is 0 in 64 bits.
  EXPECT_TRUE(has(error_of([] { heads_format("bf16", kHuge, kHuge); }),
                  "head_dim is 1099511627776, but must be in [1, 1]"));
}

TEST(KvFormat, ColumnsOfRowsWithScalesAreRefused) {
  const PagedKvCache cache = PagedKvCache::allocate(latent_format("int8_per_token", 512, 64),
                                                    {.num_blocks = 1, .block_size = 2});
  EXPECT_NE(std::string::npos, error_of([&] { cache.columns(0, 512); }).find("int8_per_token"));
}

}  // namespace
}  // namespace fovea
