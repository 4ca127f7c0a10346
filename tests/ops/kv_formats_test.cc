// Attention over caches of every format, block size and path, against float64 on the stored values.
#include <cstring>
#include <memory>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "ops/backend_test.h"
#include "ops/paged_rows.h"

namespace fovea::test {
namespace {

oracle::RowFormat oracle_format(const KvFormat& format) {
  static constexpr std::pair<DType, oracle::Format> kFormats[] = {
      {DType::f32, oracle::Format::f32},
      {DType::f16, oracle::Format::f16},
      {DType::bf16, oracle::Format::bf16},
      {DType::i8, oracle::Format::i8},
      {DType::f8e4m3fn, oracle::Format::f8e4m3fn},
      {DType::f8e5m2, oracle::Format::f8e5m2},
      {DType::i4, oracle::Format::i4}};
  oracle::RowFormat row{.num_heads = format.num_heads,
                        .first_group = format.first_group,
                        .scale = static_cast<double>(format.scale)};
  for (const auto& [dtype, known] : kFormats) {
    if (dtype == format.dtype) row.format = known;
  }
  row.scales = static_cast<oracle::RowScales>(format.scales);
  return row;
}

/// Normal values in every row of the requests, stored in the cache's format.
class StoredRows {
 public:
  StoredRows(const KvFormat& format, std::int64_t block_size, std::span<const OwnedKeys> requests,
             std::uint64_t seed)
      : format_(format),
        rows_({.format = format, .block_size = block_size, .seed = seed}, requests) {
    std::vector<float> values(static_cast<std::size_t>(format.row_elements));
    for (std::size_t r = 0; r < requests.size(); ++r) {
      for (std::int64_t key = requests[r].begin; key < requests[r].end; ++key) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          // An outlier channel, as latents have.
          const double size = i == 3 ? 20 : 1;
          values[i] = static_cast<float>(
              size * random_normal(seed + 100 * r + static_cast<std::uint64_t>(key), i));
        }
        encode_row(format_, values, bytes(static_cast<std::int64_t>(r), key));
      }
    }
  }

  const PagedKvCache& cache() const { return rows_.cache(); }
  BlockTableView table() const { return rows_.table(); }
  std::span<std::byte> bytes(std::int64_t request, std::int64_t key) const {
    return {cache().slot(rows_.slot(request, key)), static_cast<std::size_t>(format_.row_bytes())};
  }
  /// Appends the stored values of keys [begin, end) of a request.
  void append_values(std::int64_t request, std::int64_t begin, std::int64_t end,
                     std::vector<double>& values) const {
    for (std::int64_t key = begin; key < end; ++key) {
      const std::vector<double> row = oracle::decode_row(
          bytes(request, key).data(), format_.row_elements, oracle_format(format_));
      values.insert(values.end(), row.begin(), row.end());
    }
  }

 private:
  KvFormat format_;
  PagedRows rows_;
};

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

/// Grouped queries over paged keys and values in `name`; with Path::new_tokens_beside the query
/// tokens' own come unquantised, and their stored rows are NaN.
class GqaFormatProblem {
 public:
  static constexpr std::int64_t kHeads = 6, kKvHeads = 2, kQk = 40, kV = 24;

  GqaFormatProblem(std::string_view name, std::int64_t block_size, Path path, DType dtype)
      : path_(path),
        keys_(heads_format(name, kKvHeads, kQk, 0.5f), block_size, owned(path), 11),
        values_(heads_format(name, kKvHeads, kV, 0.25f), block_size, owned(path), 11),
        q_(dtype, {kTokens, kHeads, kQk}),
        new_k_(dtype, {kTokens, kKvHeads, kQk}),
        new_v_(dtype, {kTokens, kKvHeads, kV}),
        out_(dtype, {kTokens, kHeads, kV}) {
    fill_normal(q_, 1, 0.5);
    fill_normal(new_k_, 2);
    fill_normal(new_v_, 3);
  }

  PagedKv paged() const { return {&keys_.cache(), &values_.cache(), keys_.table(), kKvHeads}; }
  const PaddedTensor& q() const { return q_; }
  const PaddedTensor& out() const { return out_; }
  TensorView new_k() const {
    return path_ == Path::new_tokens_beside ? new_k_.view() : TensorView();
  }
  TensorView new_v() const {
    return path_ == Path::new_tokens_beside ? new_v_.view() : TensorView();
  }

  std::vector<double> expected(float sm_scale) const {
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
      const auto one = oracle::attention(
          {.num_queries = kQueryLens[r],
           .num_keys = kSeqLens[r],
           .num_heads = kHeads,
           .num_kv_heads = kKvHeads,
           .qk_dim = kQk,
           .v_dim = kV,
           .sm_scale = static_cast<double>(sm_scale),
           .q = to_doubles(q_.view().slice(0, kQueryStart[r], kQueryStart[r + 1])),
           .k = k,
           .v = v});
      all.insert(all.end(), one.out.begin(), one.out.end());
    }
    return all;
  }

 private:
  static std::vector<OwnedKeys> owned(Path path) {
    std::vector<OwnedKeys> keys = kAllKeys;
    if (path != Path::new_tokens_beside) return keys;
    for (std::size_t r = 0; r < 2; ++r) keys[r].end -= kQueryLens[r];
    return keys;
  }

  Path path_;
  StoredRows keys_, values_;
  PaddedTensor q_, new_k_, new_v_, out_;
};

TEST_P(KvFormats, GroupedQueriesEqualTheStoredValues) {
  constexpr float kScale = 0.2f;
  for (const std::string_view name : kv_format_names()) {
    if (name == "fp8_ds_mla") continue;  // A latent row.
    for (const std::int64_t block_size : kBlockSizes) {
      for (const Path path : {Path::decode, Path::paged_prefill, Path::new_tokens_beside}) {
        SCOPED_TRACE(std::string(name) + " in blocks of " + std::to_string(block_size) + ", path " +
                     std::to_string(static_cast<int>(path)));
        const GqaFormatProblem problem(name, block_size, path, dtype());
        if (path == Path::decode) {
          const DecodeSchedule schedule =
              schedule_decode(kQueryStart, kSeqLens, {.num_workers = 3, .decode_kv_tile = 16});
          AttentionDecodeParams params{.q = problem.q(),
                                       .kv = problem.paged(),
                                       .out = problem.out(),
                                       .lse = {},
                                       .schedule = &schedule,
                                       .variant = {},
                                       .sm_scale = kScale,
                                       .sinks = {}};
          run_poisoned(params, problem.out(), [&] { attention_decode(ctx(), params); });
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

TEST_P(KvFormats, AppendWritesWhatTheCodecSaysAndGatherReadsIt) {
  constexpr std::int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
  const PaddedTensor kv_c(dtype(), {3, kLatent}), k_pe(dtype(), {3, kRope});
  fill_normal(kv_c, 5);
  fill_normal(k_pe, 6);
  std::vector<std::int64_t> slots{4, -1, 1};
  const std::vector<std::int32_t> block{0}, start{0}, len{5};
  for (const std::string_view name : kv_format_names()) {
    SCOPED_TRACE(name);
    const KvFormat format = latent_format(name, kLatent, kRope, {0.01f, 0.01f});
    const PagedKvCache cache = PagedKvCache::allocate(format, {.num_blocks = 1, .block_size = 5});
    poison_bytes(cache.slot(0), 5 * format.row_bytes());
    kv_append(ctx(), {kv_c, k_pe, TensorView::of(slots.data(), {3}), &cache});

    std::vector<std::byte> expected(static_cast<std::size_t>(format.row_bytes()));
    for (std::int64_t t : {0, 2}) {
      std::vector<float> values;
      for (const TensorView& part : {kv_c.view().select(0, t), k_pe.view().select(0, t)}) {
        for (double x : to_doubles(part)) values.push_back(static_cast<float>(x));
      }
      encode_row(format, values, expected);
      EXPECT_EQ(0, std::memcmp(cache.slot(slots[static_cast<std::size_t>(t)]), expected.data(),
                               expected.size()));
    }
    for (std::int64_t slot : {0, 2, 3}) {
      EXPECT_TRUE(still_poisoned(cache.slot(slot), format.row_bytes()));
    }

    const PaddedTensor gathered(dtype(), {5, kWidth}), raw(DType::u8, {5, format.row_bytes()});
    const BlockTableView table{block.data(), 1, 1, 1};
    kv_gather(ctx(), {&cache, table, start, len, gathered});
    kv_gather(ctx(), {&cache, table, start, len, raw});
    for (std::int64_t slot : {1, 4}) {
      const std::vector<double> values =
          oracle::decode_row(cache.slot(slot), kWidth, oracle_format(format));
      // One rounding of the product, one to the output.
      EXPECT_TRUE(values_close(values, gathered.view().select(0, slot), 1e-7,
                               unit_roundoff(dtype()) + 0x1p-24));
      EXPECT_EQ(0, std::memcmp(raw.view().select(0, slot).data, cache.slot(slot),
                               static_cast<std::size_t>(format.row_bytes())));
    }
  }
}

TEST_P(KvFormats, AppendedHeadsAreThoseOfTheCodec) {
  constexpr std::int64_t kHeads = 3, kQk = 24, kV = 40;
  const PaddedTensor k(dtype(), {2, kHeads, kQk}), v(dtype(), {2, kHeads, kV});
  fill_normal(k, 5);
  fill_normal(v, 6);
  std::vector<std::int64_t> slots{1, 0}, positions{7, 9};
  const Tensor cos_sin = Tensor::empty(DType::f32, {10, 16});
  fill_normal(cos_sin, 8);
  for (const std::string_view name : kv_format_names()) {
    if (name == "fp8_ds_mla") continue;
    SCOPED_TRACE(name);
    const KvFormat k_format = heads_format(name, kHeads, kQk, 0.01f);
    const KvFormat v_format = heads_format(name, kHeads, kV, 0.02f);
    const KvCacheLayout layout{.num_blocks = 1, .block_size = 2};
    const PagedKvCache k_cache = PagedKvCache::allocate(k_format, layout);
    const PagedKvCache v_cache = PagedKvCache::allocate(v_format, layout);
    const RopeAngles angles{TensorView::of(positions.data(), {2}), cos_sin, RopePairing::neox, {}};
    gqa_append(ctx(), {k, v, TensorView::of(slots.data(), {2}), &k_cache, &v_cache, angles});

    // The op rope, then the codec.
    const PaddedTensor turned(dtype(), {2, kHeads, kQk});
    copy(k, turned);
    rope(ctx(), {turned.view().slice(2, 0, 16), angles});
    for (std::int64_t t = 0; t < 2; ++t) {
      const std::int64_t slot = slots[static_cast<std::size_t>(t)];
      const auto check = [&](const TensorView& heads, const KvFormat& format,
                             const PagedKvCache& cache) {
        std::vector<float> values;
        for (double x : to_doubles(heads)) values.push_back(static_cast<float>(x));
        std::vector<std::byte> expected(static_cast<std::size_t>(format.row_bytes()));
        encode_row(format, values, expected);
        EXPECT_EQ(0, std::memcmp(cache.slot(slot), expected.data(), expected.size()));
      };
      check(turned.view().select(0, t), k_format, k_cache);
      check(v.view().select(0, t), v_format, v_cache);
    }
  }
}

}  // namespace
}  // namespace fovea::test
