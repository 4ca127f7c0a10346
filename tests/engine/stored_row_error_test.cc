// What verification says of a stored row: nothing of rows as the format stores them, and something
// of every code that is one off.
#include "engine/stored_row_error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/oracle_weights.h"
#include "fovea/engine.h"
#include "support/poison.h"

namespace fovea {
namespace {

/// Normal values with an outlier, as a format stores them.
struct StoredRow {
  explicit StoredRow(const KvFormat& format_)
      : format(format_), bytes(static_cast<std::size_t>(format.row_bytes())) {
    std::vector<float> row;
    for (std::size_t i = 0; i < static_cast<std::size_t>(format.row_elements); ++i) {
      row.push_back(static_cast<float>((i == 3 ? 20 : 1) * test::random_normal(5, i)));
    }
    encode_row(format, row, bytes);
    values.assign(row.begin(), row.end());
  }
  std::vector<double> decoded() const {
    return oracle::decode_row(bytes.data(), format.row_elements, engine::oracle_row_format(format));
  }
  double error() const { return engine::stored_row_error(format, values, decoded()).error; }

  KvFormat format;
  std::vector<std::byte> bytes;
  std::vector<double> values;
};

std::vector<KvFormat> formats() {
  std::vector<KvFormat> all;
  for (const std::string_view name : kv_format_names()) {
    all.push_back(latent_format(name, 512, 64, {0.05f, 0.05f}));
    if (name != "fp8_ds_mla") all.push_back(heads_format(name, 2, 32, 0.05f));
  }
  all.push_back(latent_format("fp8_ds_mla", 512, 64));
  all.back().power_of_two_scales = true;
  return all;
}

TEST(StoredRowError, RowsAsTheFormatStoresThemHaveNone) {
  for (const KvFormat& format : formats()) EXPECT_LT(StoredRow(format).error(), 1e-6);
}

TEST(StoredRowError, ZerosHaveNone) {
  for (const KvFormat& format : formats()) {
    const std::vector<double> zeros(static_cast<std::size_t>(format.row_elements), 0.0);
    EXPECT_EQ(engine::stored_row_error(format, zeros, zeros).error, 0) << format.name();
  }
}

TEST(StoredRowError, OneCodeThatIsOneOffIsSeen) {
  for (const KvFormat& format : formats()) {
    if (is_compute_dtype(format.dtype)) continue;
    StoredRow row(format);
    const std::vector<double> before = row.decoded();
    int seen = 0;
    for (std::size_t i = 0; i < 64; ++i) {
      // Its neighbours on either side: at least one is beyond half a step.
      const bool is_int4 = format.dtype == DType::i4;
      const std::size_t at = is_int4 ? i / 2 : i % static_cast<std::size_t>(format.head_elements());
      const std::byte kept = row.bytes[at];
      for (const int off : {-1, 1}) {
        row.bytes[at] = static_cast<std::byte>(static_cast<int>(kept) + off);
        const std::vector<double> after = row.decoded();
        double largest = 0;
        for (std::size_t k = 0; k < after.size(); ++k) {
          largest = std::max(largest, std::abs(after[k] - before[k]));
        }
        if (largest > 0 && row.error() > Verifier::limit(DType::f32)) ++seen;
        row.bytes[at] = kept;
      }
    }
    EXPECT_GT(seen, 64) << format.name();
  }
}

TEST(StoredRowError, AWrongScaleAndANaNAreSeen) {
  for (const char* name : {"int8_per_token", "int4_per_token"}) {
    // Every other code, under a scale of twice the size.
    KvFormat coarse = latent_format(name, 512, 64);
    const StoredRow row(coarse);
    std::vector<double> doubled = row.values;
    const std::vector<double> once = row.decoded();
    for (std::size_t i = 0; i < doubled.size(); ++i) {
      const double step = 2 * std::abs(once[3]) / (coarse.dtype == DType::i8 ? 127 : 7);
      doubled[i] = i < 512 ? std::nearbyint(row.values[i] / step) * step : once[i];
    }
    EXPECT_GT(engine::stored_row_error(coarse, row.values, doubled).error,
              Verifier::limit(DType::f32));
  }
  const StoredRow row(latent_format("bf16", 512, 64));
  std::vector<double> stored = row.decoded();
  stored[9] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isinf(engine::stored_row_error(row.format, row.values, stored).error));
}

}  // namespace
}  // namespace fovea
