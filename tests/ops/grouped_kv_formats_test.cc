// Grouped queries over caches of every format, block size and path, against float64 on the stored
// values.
#include <cmath>
#include <cstring>
#include <span>
#include <string>

#include "ops/gqa_format_problem.h"

namespace fovea::test {
namespace {

class GroupedKvFormats : public KvFormats {
 protected:
  void run_decode(const GqaFormatProblem& problem, float sm_scale, bool is_fast = false) {
    const DecodeSchedule schedule =
        schedule_decode(kQueryStart, kSeqLens, {.num_workers = 3, .decode_kv_tile = 16});
    const AttentionDecodeParams params{.q = problem.q(),
                                       .kv = problem.paged(),
                                       .out = problem.out(),
                                       .lse = {},
                                       .schedule = &schedule,
                                       .variant = {},
                                       .sm_scale = sm_scale,
                                       .sinks = {}};
    run_poisoned(params, problem.out(), [&] { attention_decode(ctx(), params); });
    if (is_fast) expect_fast(kAttentionDecode, params);
  }
};
FOVEA_FOR_EACH_BACKEND(GroupedKvFormats);

TEST_P(GroupedKvFormats, GroupedQueriesEqualTheStoredValues) {
  constexpr float kScale = 0.2f;
  for (const std::string_view name : kv_format_names()) {
    if (name == "fp8_ds_mla") continue;  // A latent row.
    for (const std::int64_t block_size : kBlockSizes) {
      for (const Path path : {Path::decode, Path::paged_prefill, Path::new_tokens_beside}) {
        SCOPED_TRACE(std::string(name) + " in blocks of " + std::to_string(block_size) + ", path " +
                     std::to_string(static_cast<int>(path)));
        const GqaFormatProblem problem(name, block_size, path, dtype());
        if (path == Path::decode) {
          run_decode(problem, kScale);
        } else {
          const PrefillSchedule schedule = schedule_prefill(kQueryStart, kKeyStart, 2);
          AttentionPrefillParams params{.q = problem.q(),
                                        .k = problem.new_k(),
                                        .k_pe = {},
                                        .v = problem.new_v(),
                                        .out = problem.out(),
                                        .lse = {},
                                        .schedule = &schedule,
                                        .variant = {},
                                        .sm_scale = kScale,
                                        .paged = problem.paged(),
                                        .sinks = {}};
          run_poisoned(params, problem.out(), [&] { attention_prefill(ctx(), params); });
        }
        EXPECT_TRUE(
            rows_close(problem.expected(kScale), problem.out(), attention_tolerance(dtype())));
      }
    }
  }
}

TEST_P(GroupedKvFormats, HeadsOfUsualWidthsEqualTheStoredValues) {
  constexpr float kScale = 0.1f;
  for (const std::string_view name : kv_format_names()) {
    if (name == "fp8_ds_mla") continue;
    for (const HeadDims& dims : kUsualDims) {
      for (const std::int64_t block_size : {3, 64}) {
        SCOPED_TRACE(std::string(name) + " in blocks of " + std::to_string(block_size) + ", " +
                     std::to_string(dims.v) + " channels");
        const GqaFormatProblem problem(name, block_size, Path::decode, dtype(), dims);
        // Dense blocks of another dtype than the queries' are nobody's business.
        const bool is_dense = name == "bf16" || name == "f16" || name == "f32";
        run_decode(problem, kScale, !is_dense || name == name_of(dtype()));
        EXPECT_TRUE(
            rows_close(problem.expected(kScale), problem.out(), attention_tolerance(dtype())));
      }
    }
  }
}

/// A NaN or an infinity in the value of the last key of a request, which its last query token alone
/// sees: `spoil` gets that value of key head 1. The token's heads of it are `expected` in channels
/// [begin, end), all else is as before.
class SpoiledKvFormats : public GroupedKvFormats {
 protected:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  template <class Spoil>
  void expect_nan(std::string_view name, const HeadDims& dims, std::int64_t begin,
                  std::int64_t end, Spoil&& spoil) {
    expect_spoiled(name, dims, begin, end, std::nan(""), spoil);
  }
  template <class Spoil>
  void expect_spoiled(std::string_view name, const HeadDims& dims, std::int64_t begin,
                      std::int64_t end, double expected, Spoil&& spoil) {
    SCOPED_TRACE(std::string(name) + ", " + std::to_string(dims.v) + " channels");
    constexpr std::int64_t kHead = 1;
    const GqaFormatProblem problem(name, 64, Path::decode, dtype(), dims);
    run_decode(problem, 0.1f);
    const std::vector<double> clean = to_doubles(problem.out());
    spoil(problem.stored_value(0, kSeqLens[0] - 1, kHead));
    run_decode(problem, 0.1f);
    const std::vector<double> got = to_doubles(problem.out());
    const std::int64_t group = dims.heads / GqaFormatProblem::kKvHeads;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const std::int64_t token = at / (dims.v * dims.heads), channel = at % dims.v;
      const std::int64_t head = at / dims.v % dims.heads / group;
      if (token == kQueryLens[0] - 1 && head == kHead && channel >= begin && channel < end) {
        ASSERT_TRUE(got[i] == expected || (std::isnan(got[i]) && std::isnan(expected)))
            << "element " << i << " is " << got[i] << " instead of " << expected;
      } else {
        ASSERT_EQ(clean[i], got[i]) << "element " << i;
      }
    }
  }
};
FOVEA_FOR_EACH_BACKEND(SpoiledKvFormats);

TEST_P(SpoiledKvFormats, ANaNCodeReachesOnlyQueriesThatSeeIt) {  // B050
  for (const std::string_view name : {"fp8_e4m3", "fp8_e5m2", "fp8_per_token"}) {
    for (const HeadDims& dims : kUsualDims) {
      expect_nan(name, dims, 21, 22,
                 [](std::span<std::byte> value) { value[21] = std::byte{0x7f}; });
    }
  }
}

TEST_P(SpoiledKvFormats, AnInfiniteCodeReachesOnlyQueriesThatSeeIt) {
  for (const HeadDims& dims : kUsualDims) {
    expect_spoiled("fp8_e5m2", dims, 21, 22, -kInfinity,
                   [](std::span<std::byte> value) { value[21] = std::byte{0xfc}; });
  }
}

TEST_P(SpoiledKvFormats, ANaNScaleReachesOnlyQueriesThatSeeIt) {  // B050
  for (const std::string_view name : {"int8_per_token", "int4_per_token", "fp8_per_token"}) {
    for (const HeadDims& dims : kUsualDims) {
      expect_nan(name, dims, dims.v / 2, dims.v, [](std::span<std::byte> value) {
        const float nan = std::nanf("");  // The second scale, of the second half.
        std::memcpy(value.data() + value.size() - sizeof nan, &nan, sizeof nan);
      });
    }
  }
}

/// As rounding_test.cc has it for rows of the queries' own dtype: docs/semantics.md, Rounding.
class RoundingOverInt8 : public GroupedKvFormats {};
INSTANTIATE_TEST_SUITE_P(, RoundingOverInt8,
                         ::testing::Combine(::testing::ValuesIn(available_backends()),
                                            ::testing::Values(DType::bf16)),
                         backend_case_name);

TEST_P(RoundingOverInt8, ElementsAreWithinTheirBound) {
  for (const float scale : {0.05f, 0.3f}) {
    const GqaFormatProblem problem("int8_per_token", 16, Path::decode, dtype());
    run_decode(problem, scale);
    const std::vector<double> expected = problem.expected(scale);
    const std::vector<double> magnitudes = problem.expected(scale, true);
    const std::vector<double> fixed_point = problem.fixed_point_errors(scale);
    const std::vector<double> got = to_doubles(problem.out());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double unit = std::exp2(std::floor(std::log2(std::abs(expected[i]) + 1e-30)) - 7);
      const double allowed = 2 * unit + fixed_point[i] +
                             (weight_rounding() + 0x1p-12 + 0x1p-14) * magnitudes[i];
      ASSERT_NEAR(expected[i], got[i], allowed) << "element " << i << ", scale " << scale;
    }
  }
}

}  // namespace
}  // namespace fovea::test
