// MLA decode over caches of every format and block size, against float64 on the stored values.
#include <algorithm>
#include <cmath>
#include <span>

#include "fovea/oracle.h"
#include "ops/kv_formats.h"

namespace fovea::test {
namespace {

FOVEA_FOR_EACH_BACKEND(KvFormats);

TEST_P(KvFormats, MlaDecodeEqualsTheStoredValues) {
  constexpr std::int64_t kHeads = 5, kLatent = 512, kRope = 64;
  const PaddedTensor q_latent = padded_rows(dtype(), {kTokens, kHeads, kLatent}, true);
  const PaddedTensor q_pe = padded_rows(dtype(), {kTokens, kHeads, kRope}, true);
  const PaddedTensor out = padded_rows(dtype(), {kTokens, kHeads, kLatent}, true);
  fill_normal(q_latent, 1, 0.5);
  fill_normal(q_pe, 2, 0.5);
  for (const std::string_view name : kv_format_names()) {
    for (const std::int64_t block_size : kBlockSizes) {
      SCOPED_TRACE(std::string(name) + " in blocks of " + std::to_string(block_size));
      const KvFormat format = latent_format(name, kLatent, kRope, {0.5f, 0.5f});
      const StoredRows rows(format, block_size, kAllKeys, 7);
      MlaDecodeParams params{.q_latent = q_latent,
                             .q_pe = q_pe,
                             .cache = &rows.cache(),
                             .block_table = rows.table(),
                             .out = out,
                             .lse = {},
                             .variant = {},
                             .sm_scale = 0.06f,
                             .sinks = {},
                             .q_scale = 0.f};
      const DecodeSchedule schedule =
          schedule_decode(kQueryStart, kSeqLens, {.num_workers = 3, .decode_kv_tile = 16});
      params.schedule = &schedule;
      run_poisoned(params, out, [&] { mla_decode(ctx(), params); });
      // Rows of another 16-bit dtype than the queries', or such rope channels, are not taken.
      const bool is_dense = format.scales == KvScales::none;
      const bool is_bf16 = dtype() == DType::bf16;
      if (is_dense ? name == name_of(dtype()) : is_bf16 || format.scales != KvScales::ds_mla) {
        expect_fast(kMlaDecode, params);
      }

      std::vector<double> expected;
      for (std::size_t r = 0; r < 2; ++r) {
        std::vector<double> q, k, v;
        rows.append_values(static_cast<std::int64_t>(r), 0, kSeqLens[r], k);
        for (std::int64_t t = kQueryStart[r]; t < kQueryStart[r + 1]; ++t) {
          for (std::int64_t n = 0; n < kHeads; ++n) {
            for (const TensorView& part : {q_latent.view(), q_pe.view()}) {
              const std::vector<double> row = to_doubles(part.select(0, t).select(0, n));
              q.insert(q.end(), row.begin(), row.end());
            }
          }
        }
        for (std::int64_t key = 0; key < kSeqLens[r]; ++key) {
          v.insert(v.end(), k.begin() + key * 576, k.begin() + key * 576 + 512);
        }
        const auto one = oracle::attention({.num_queries = kQueryLens[r],
                                            .num_keys = kSeqLens[r],
                                            .num_heads = kHeads,
                                            .num_kv_heads = 1,
                                            .qk_dim = kLatent + kRope,
                                            .v_dim = kLatent,
                                            .sm_scale = static_cast<double>(params.sm_scale),
                                            .q = q,
                                            .k = k,
                                            .v = v});
        expected.insert(expected.end(), one.out.begin(), one.out.end());
      }
      EXPECT_TRUE(rows_close(expected, out, attention_tolerance(dtype())));
    }
  }
}

/// Queries of one FP8 scale over a cache of another: both scales count, on every path.
TEST_P(KvFormats, QuantisedQueriesMeetQuantisedKeys) {  // F167, F159
  constexpr std::int64_t kHeads = 5, kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
  constexpr float kQScale = 0.02f;
  const PaddedTensor q(dtype(), {kTokens, kHeads, kWidth});
  const PaddedTensor codes(DType::f8e4m3fn, {kTokens, kHeads, kWidth});
  const PaddedTensor out(dtype(), {kTokens, kHeads, kLatent});
  fill_normal(q, 1, 0.5);
  fill_normal(q.view().slice(2, 9, 10), 1, 1000);  // Saturates.
  const TensorView q_latent = q.view().slice(2, 0, kLatent),
                   q_pe = q.view().slice(2, kLatent, kWidth);
  quantize_query(ctx(), {q_latent, q_pe, codes, kQScale});
  EXPECT_TRUE(codes.padding_untouched());

  std::vector<double> values;  // [T, N, L + R] as stored.
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t n = 0; n < kHeads; ++n) {
      const std::vector<double> exact = to_doubles(q.view().select(0, t).select(0, n));
      const std::vector<double> stored = oracle::decode(codes.view().ptr<std::uint8_t>({t, n, 0}),
                                                        kWidth, oracle::Format::f8e4m3fn);
      for (std::size_t i = 0; i < stored.size(); ++i) {
        const double clamped = std::clamp(exact[i] / static_cast<double>(kQScale), -448., 448.);
        EXPECT_NEAR(clamped, stored[i], std::abs(stored[i]) / 16 + 0x1p-10);
        values.push_back(stored[i] * static_cast<double>(kQScale));
      }
    }
  }
  const StoredRows rows(latent_format("fp8_e4m3", kLatent, kRope, {0.5f, 0.5f}), 16, kAllKeys, 7);
  const DecodeSchedule schedule =
      schedule_decode(kQueryStart, kSeqLens, {.num_workers = 3, .decode_kv_tile = 16});
  const MlaDecodeParams params{.q_latent = codes.view().slice(2, 0, kLatent),
                               .q_pe = codes.view().slice(2, kLatent, kWidth),
                               .cache = &rows.cache(),
                               .block_table = rows.table(),
                               .out = out,
                               .lse = {},
                               .schedule = &schedule,
                               .variant = {},
                               .sm_scale = 0.03f,
                               .sinks = {},
                               .q_scale = kQScale};
  run_poisoned(params, out, [&] { mla_decode(ctx(), params); });
  std::vector<double> expected;
  for (std::size_t r = 0; r < 2; ++r) {
    std::vector<double> k, v;
    rows.append_values(static_cast<std::int64_t>(r), 0, kSeqLens[r], k);
    for (std::int64_t key = 0; key < kSeqLens[r]; ++key) {
      v.insert(v.end(), k.begin() + key * kWidth, k.begin() + key * kWidth + kLatent);
    }
    const auto first = static_cast<std::size_t>(kQueryStart[r] * kHeads * kWidth);
    const auto count = static_cast<std::size_t>(kQueryLens[r] * kHeads * kWidth);
    const auto one = oracle::attention({.num_queries = kQueryLens[r],
                                        .num_keys = kSeqLens[r],
                                        .num_heads = kHeads,
                                        .num_kv_heads = 1,
                                        .qk_dim = kWidth,
                                        .v_dim = kLatent,
                                        .sm_scale = static_cast<double>(params.sm_scale),
                                        .q = std::span(values).subspan(first, count),
                                        .k = k,
                                        .v = v});
    expected.insert(expected.end(), one.out.begin(), one.out.end());
  }
  EXPECT_TRUE(rows_close(expected, out, attention_tolerance(dtype())));

  MlaDecodeParams wrong = params;
  wrong.q_scale = 0.f;
  expect_error(ErrorCode::invalid_argument, {"q_scale is 0 with queries in f8e4m3fn"},
               [&] { mla_decode(ctx(), wrong); });
  wrong = params;
  wrong.q_latent = q_latent;
  wrong.q_pe = q_pe;
  expect_error(ErrorCode::invalid_argument, {"q_scale is 0.02", "it must be 0"},
               [&] { mla_decode(ctx(), wrong); });
  expect_error(ErrorCode::invalid_argument, {"quantize_query: scale is -1"}, [&] {
    quantize_query(ctx(), {q_latent, q_pe, codes, -1.f});
  });
}

}  // namespace
}  // namespace fovea::test
