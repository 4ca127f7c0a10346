// Attention over caches of every format, block size and path, against float64 on the stored values.
#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "ops/backend_test.h"
#include "ops/stored_rows.h"

namespace fovea::test {
namespace {

/// Two requests of ragged lengths.
constexpr std::int32_t kQueryLens[] = {3, 1};
constexpr std::int32_t kSeqLens[] = {131, 40};
constexpr std::int64_t kTokens = 4;
const std::vector<std::int32_t> kQueryStart{0, 3, 4};
const std::vector<std::int32_t> kKeyStart{0, 131, 171};
const std::vector<OwnedKeys> kAllKeys{{0, 131}, {0, 40}};
constexpr std::int64_t kBlockSizes[] = {1, 16, 48, 64, 100};

class KvFormats : public BackendTest {
 protected:
  template <class Params, class Call>
  void run_poisoned(const Params& params, const PaddedTensor& out, Call&& call) {
    ctx().workspace->reserve(workspace_bytes(ctx(), params));
    poison(*ctx().workspace);
    poison(out);
    call();
    EXPECT_TRUE(out.padding_untouched());
  }
};
FOVEA_FOR_EACH_BACKEND(KvFormats);

TEST_P(KvFormats, MlaDecodeEqualsTheStoredValues) {
  constexpr std::int64_t kHeads = 5, kLatent = 512, kRope = 64;
  const PaddedTensor q_latent(dtype(), {kTokens, kHeads, kLatent});
  const PaddedTensor q_pe(dtype(), {kTokens, kHeads, kRope});
  const PaddedTensor out(dtype(), {kTokens, kHeads, kLatent});
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

enum class Path { decode, paged_prefill, new_tokens_beside };

struct HeadDims {
  std::int64_t qk, v;
};
constexpr HeadDims kOddDims{40, 24};
/// What kernels are written for.
constexpr HeadDims kUsualDims[] = {{64, 64}, {128, 128}};

/// Grouped queries over paged keys and values in `name`; with Path::new_tokens_beside the query
/// tokens' own come unquantised, and their stored rows are NaN.
class GqaFormatProblem {
 public:
  static constexpr std::int64_t kHeads = 6, kKvHeads = 2;

  GqaFormatProblem(std::string_view name, std::int64_t block_size, Path path, DType dtype,
                   const HeadDims& dims = kOddDims)
      : path_(path),
        dims_(dims),
        keys_(heads_format(name, kKvHeads, dims.qk, 0.5f), block_size, owned(path), 11),
        values_(heads_format(name, kKvHeads, dims.v, 0.25f), block_size, owned(path), 11),
        q_(dtype, {kTokens, kHeads, dims.qk}, kGap, kGap),
        new_k_(dtype, {kTokens, kKvHeads, dims.qk}),
        new_v_(dtype, {kTokens, kKvHeads, dims.v}),
        out_(dtype, {kTokens, kHeads, dims.v}, kGap, kGap) {
    fill_normal(q_, 1, 0.5);
    fill_normal(new_k_, 2);
    fill_normal(new_v_, 3);
  }

  PagedKv paged() const { return {&keys_.cache(), &values_.cache(), keys_.table(), kKvHeads}; }
  const PaddedTensor& q() const { return q_; }
  const PaddedTensor& out() const { return out_; }
  /// The codes of head `head` of a key's values; of formats without scales.
  std::byte* value_codes(std::int64_t request, std::int64_t key, std::int64_t head) const {
    return values_.bytes(request, key).data() + head * dims_.v;
  }
  TensorView new_k() const {
    return path_ == Path::new_tokens_beside ? new_k_.view() : TensorView();
  }
  TensorView new_v() const {
    return path_ == Path::new_tokens_beside ? new_v_.view() : TensorView();
  }

  /// Of the stored values; `magnitudes`: of their magnitudes.
  std::vector<double> expected(float sm_scale, bool magnitudes = false) const {
    std::vector<double> all;
    for (std::size_t r = 0; r < 2; ++r) {
      const bool beside = path_ == Path::new_tokens_beside;
      const std::int64_t stored = kSeqLens[r] - (beside ? kQueryLens[r] : 0);
      std::vector<double> k, v;
      keys_.append_values(static_cast<std::int64_t>(r), 0, stored, k);
      values_.append_values(static_cast<std::int64_t>(r), 0, stored, v);
      if (beside) {
        const auto own = [&](const PaddedTensor& rows) {
          return to_doubles(rows.view().slice(0, kQueryStart[r], kQueryStart[r + 1]));
        };
        const std::vector<double> own_k = own(new_k_), own_v = own(new_v_);
        k.insert(k.end(), own_k.begin(), own_k.end());
        v.insert(v.end(), own_v.begin(), own_v.end());
      }
      if (magnitudes) {
        for (double& x : v) x = std::abs(x);
      }
      const auto one = oracle::attention(
          {.num_queries = kQueryLens[r],
           .num_keys = kSeqLens[r],
           .num_heads = kHeads,
           .num_kv_heads = kKvHeads,
           .qk_dim = dims_.qk,
           .v_dim = dims_.v,
           .sm_scale = static_cast<double>(sm_scale),
           .q = to_doubles(q_.view().slice(0, kQueryStart[r], kQueryStart[r + 1])),
           .k = k,
           .v = v});
      all.insert(all.end(), one.out.begin(), one.out.end());
    }
    return all;
  }

  /// By how much elements may be off where weights meet int8 values in fixed point: in each tile of
  /// 64 keys, products of weight and scale are off by 2^-16 of the largest of them.
  std::vector<double> fixed_point_errors(float sm_scale) const {
    constexpr std::int64_t kTile = 64;
    std::vector<double> all;
    for (std::size_t r = 0; r < 2; ++r) {
      const std::int64_t keys = kSeqLens[r];
      std::vector<double> v;
      values_.append_values(static_cast<std::int64_t>(r), 0, keys, v);
      const std::vector<double> all_weights = weights(r, sm_scale);
      for (std::int64_t row = 0; row < kQueryLens[r] * kHeads; ++row) {
        const double* row_weights = &all_weights[static_cast<std::size_t>(row * keys)];
        const std::int64_t head = row % kHeads / (kHeads / kKvHeads);
        for (std::int64_t c = 0; c < dims_.v; ++c) {
          double error = 0, largest = 0, codes = 0;
          for (std::int64_t key = 0; key < keys; ++key) {
            if (key % kTile == 0) largest = 0, codes = 0;
            const double* value = &v[static_cast<std::size_t>((key * kKvHeads + head) * dims_.v)];
            error -= largest * codes;  // Of the tile, up to this key.
            largest = std::max(largest, row_weights[key] * int8_scale(value, c));
            codes += std::abs(value[c]) / int8_scale(value, c);
            error += largest * codes;
          }
          all.push_back(0x1p-16 * error);
        }
      }
    }
    return all;
  }

 private:
  static constexpr std::int64_t kGap = 8;  // Rows stay multiples of 16 bytes in 16-bit dtypes.

  /// [query][head][key] of a request.
  std::vector<double> weights(std::size_t r, float sm_scale) const {
    const std::int64_t keys = kSeqLens[r];
    std::vector<double> k, one_hot(static_cast<std::size_t>(keys * kKvHeads * keys));
    keys_.append_values(static_cast<std::int64_t>(r), 0, keys, k);
    for (std::int64_t i = 0; i < keys * kKvHeads; ++i) {
      one_hot[static_cast<std::size_t>(i * keys + i / kKvHeads)] = 1;
    }
    const TensorView q = q_.view().slice(0, kQueryStart[r], kQueryStart[r + 1]);
    return oracle::attention({.num_queries = kQueryLens[r],
                              .num_keys = keys,
                              .num_heads = kHeads,
                              .num_kv_heads = kKvHeads,
                              .qk_dim = dims_.qk,
                              .v_dim = keys,
                              .sm_scale = static_cast<double>(sm_scale),
                              .q = to_doubles(q),
                              .k = k,
                              .v = one_hot})
        .out;
  }
  /// Of channel c's half of a head, whose largest code is 127.
  double int8_scale(const double* value, std::int64_t c) const {
    double largest = 0;
    const std::int64_t half = dims_.v / 2, begin = c / half * half;
    for (std::int64_t i = begin; i < begin + half; ++i) {
      largest = std::max(largest, std::abs(value[i]));
    }
    return largest / 127;
  }
  static std::vector<OwnedKeys> owned(Path path) {
    std::vector<OwnedKeys> keys = kAllKeys;
    if (path != Path::new_tokens_beside) return keys;
    for (std::size_t r = 0; r < 2; ++r) keys[r].end -= kQueryLens[r];
    return keys;
  }

  Path path_;
  HeadDims dims_;
  StoredRows keys_, values_;
  PaddedTensor q_, new_k_, new_v_, out_;
};

class GroupedKvFormats : public KvFormats {
 protected:
  void run_decode(const GqaFormatProblem& problem, float sm_scale) {
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
        run_decode(problem, kScale);
        EXPECT_TRUE(
            rows_close(problem.expected(kScale), problem.out(), attention_tolerance(dtype())));
      }
    }
  }
}

TEST_P(GroupedKvFormats, ANaNCodeReachesOnlyQueriesThatSeeIt) {  // B050
  constexpr std::int64_t kChannel = 21, kHead = 1;
  for (const HeadDims& dims : kUsualDims) {
    const GqaFormatProblem problem("fp8_e4m3", 64, Path::decode, dtype(), dims);
    run_decode(problem, 0.1f);
    const std::vector<double> clean = to_doubles(problem.out());
    // The last key of a request, which its last query token alone sees.
    problem.value_codes(0, kSeqLens[0] - 1, kHead)[kChannel] = std::byte{0x7f};
    run_decode(problem, 0.1f);
    const std::vector<double> got = to_doubles(problem.out());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const std::int64_t token = at / (dims.v * GqaFormatProblem::kHeads);
      const std::int64_t head = at / dims.v % GqaFormatProblem::kHeads / 3;
      if (token == kQueryLens[0] - 1 && head == kHead && at % dims.v == kChannel) {
        EXPECT_TRUE(std::isnan(got[i])) << "element " << i;
      } else {
        EXPECT_EQ(clean[i], got[i]) << "element " << i;
      }
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
