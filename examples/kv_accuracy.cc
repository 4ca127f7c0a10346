// What a KV format costs in accuracy: one decode step over a quantised cache against float64 on the
// values before they were stored. Prints the table of docs/kv-formats.md.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "fovea/runtime.h"

namespace {

constexpr std::int64_t kHeads = 16, kKeys = 2048, kBlockSize = 64, kBlocks = kKeys / kBlockSize;
constexpr std::int64_t kLatent = 512, kRope = 64, kHeadDim = 128, kKvHeads = 4;

/// Keys or values [kKeys, width]. Outliers: every 64th channel is 20 times as large, as in real
/// latents and keys.
std::vector<float> make_rows(std::int64_t width, bool outliers, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(kKeys * width));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool is_outlier = outliers && i % static_cast<std::size_t>(width) % 64 == 7;
    rows[i] = normal(random) * (is_outlier ? 20.f : 1.f);
  }
  return rows;
}

/// Rows [begin, end) of queries whose scores have a standard deviation of about 2.
std::vector<float> make_queries(std::int64_t width, const std::vector<float>& keys) {
  double square = 0;
  for (float x : keys) square += static_cast<double>(x) * x;
  const double key_norm = std::sqrt(square / kKeys);
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0.f, static_cast<float>(2 / key_norm));
  std::vector<float> queries(static_cast<std::size_t>(kHeads * width));
  for (float& q : queries) q = normal(random);
  return queries;
}

fovea::PagedKvCache store(const fovea::KvFormat& format, const std::vector<float>& rows) {
  fovea::PagedKvCache cache =
      fovea::PagedKvCache::allocate(format, {.num_blocks = kBlocks, .block_size = kBlockSize});
  const auto width = static_cast<std::size_t>(format.row_elements);
  const auto bytes = static_cast<std::size_t>(format.row_bytes());
  for (std::size_t key = 0; key < kKeys; ++key) {
    fovea::encode_row(format, std::span(rows).subspan(key * width, width),
                      {cache.slot(static_cast<std::int64_t>(key)), bytes});
  }
  return cache;
}

/// Of each head's output row against its norm; sorted.
std::vector<double> errors(const fovea::Tensor& out, const std::vector<double>& expected) {
  const std::size_t width = expected.size() / kHeads;
  std::vector<double> all;
  for (std::size_t n = 0; n < kHeads; ++n) {
    double difference = 0, norm = 0;
    for (std::size_t i = n * width; i < (n + 1) * width; ++i) {
      const double d = static_cast<double>(out.ptr<float>()[i]) - expected[i];
      difference += d * d;
      norm += expected[i] * expected[i];
    }
    all.push_back(std::sqrt(difference / norm));
  }
  std::sort(all.begin(), all.end());
  return all;
}

std::vector<double> doubles(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

fovea::Tensor tensor_of(std::vector<float>& values, std::int64_t width) {
  fovea::Tensor tensor = fovea::Tensor::empty(fovea::DType::f32, {1, kHeads, width});
  std::copy(values.begin(), values.end(), tensor.ptr<float>());
  return tensor;
}

struct Step {
  std::vector<std::int32_t> query_start_loc{0, 1}, seq_lens{kKeys}, blocks;
  Step() {
    for (std::int32_t b = 0; b < kBlocks; ++b) blocks.push_back(b);
  }
  fovea::BlockTableView table() const { return {blocks.data(), 1, kBlocks, kBlocks}; }
};

std::vector<double> mla_errors(const fovea::Runtime& runtime, const std::string& name,
                               bool outliers) {
  constexpr std::int64_t kWidth = kLatent + kRope;
  const std::vector<float> rows = make_rows(kWidth, outliers, 1);
  std::vector<float> queries = make_queries(kWidth, rows);
  const std::vector<double> q = doubles(queries), k = doubles(rows);
  std::vector<double> v;
  for (std::int64_t key = 0; key < kKeys; ++key) {
    v.insert(v.end(), k.begin() + key * kWidth, k.begin() + key * kWidth + kLatent);
  }
  const auto expected = fovea::oracle::attention({.num_queries = 1,
                                                  .num_keys = kKeys,
                                                  .num_heads = kHeads,
                                                  .num_kv_heads = 1,
                                                  .qk_dim = kWidth,
                                                  .v_dim = kLatent,
                                                  .sm_scale = 1,
                                                  .q = q,
                                                  .k = k,
                                                  .v = v});
  const fovea::PagedKvCache cache = store(fovea::latent_format(name, kLatent, kRope), rows);
  const fovea::Tensor query = tensor_of(queries, kWidth);
  const fovea::Tensor out = fovea::Tensor::empty(fovea::DType::f32, {1, kHeads, kLatent});
  const Step step;
  fovea::MlaDecodeParams params;
  params.q_latent = query.view().slice(2, 0, kLatent);
  params.q_pe = query.view().slice(2, kLatent, kWidth);
  params.cache = &cache;
  params.block_table = step.table();
  params.out = out;
  params.sm_scale = 1.f;
  fovea::mla_decode_once(runtime, params, step.query_start_loc, step.seq_lens);
  return errors(out, expected.out);
}

std::vector<double> gqa_errors(const fovea::Runtime& runtime, const std::string& name,
                               bool outliers) {
  constexpr std::int64_t kWidth = kKvHeads * kHeadDim;
  const std::vector<float> keys = make_rows(kWidth, outliers, 1);
  const std::vector<float> values = make_rows(kWidth, outliers, 2);
  std::vector<float> queries = make_queries(kHeadDim, make_rows(kHeadDim, outliers, 1));
  const std::vector<double> q = doubles(queries), k = doubles(keys), v = doubles(values);
  const auto expected = fovea::oracle::attention({.num_queries = 1,
                                                  .num_keys = kKeys,
                                                  .num_heads = kHeads,
                                                  .num_kv_heads = kKvHeads,
                                                  .qk_dim = kHeadDim,
                                                  .v_dim = kHeadDim,
                                                  .sm_scale = 1,
                                                  .q = q,
                                                  .k = k,
                                                  .v = v});
  const fovea::KvFormat format = fovea::heads_format(name, kKvHeads, kHeadDim);
  const fovea::PagedKvCache k_cache = store(format, keys), v_cache = store(format, values);
  const fovea::Tensor query = tensor_of(queries, kHeadDim);
  const fovea::Tensor out = fovea::Tensor::empty(fovea::DType::f32, {1, kHeads, kHeadDim});
  const Step step;
  fovea::AttentionDecodeParams params;
  params.q = query;
  params.kv = {&k_cache, &v_cache, step.table(), kKvHeads};
  params.out = out;
  params.sm_scale = 1.f;
  fovea::attention_decode_once(runtime, params, step.query_start_loc, step.seq_lens);
  return errors(out, expected.out);
}

void print_errors(const std::vector<double>& sorted) {
  std::printf(" %.1e / %.1e |", sorted[sorted.size() / 2], sorted.back());
}

}  // namespace

int main() {
  const fovea::Runtime runtime;
  std::printf(
      "| format | latent row | latent, with outliers | key of 128 | head, with outliers |\n");
  std::printf("|---|---|---|---|---|\n");
  for (const std::string_view view : fovea::kv_format_names()) {
    const std::string name(view);
    const bool for_heads = name != "fp8_ds_mla";
    std::printf("| `%s` | %ld B:", name.c_str(),
                static_cast<long>(fovea::latent_format(name, kLatent, kRope).row_bytes()));
    print_errors(mla_errors(runtime, name, false));
    print_errors(mla_errors(runtime, name, true));
    if (for_heads) {
      std::printf(" %ld B:", static_cast<long>(fovea::heads_format(name, 1, kHeadDim).row_bytes()));
      print_errors(gqa_errors(runtime, name, false));
      print_errors(gqa_errors(runtime, name, true));
    } else {
      std::printf(" - | - |");
    }
    std::printf("\n");
  }
  return 0;
}
