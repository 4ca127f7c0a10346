// Checks attention prefill over many tiles against a float64 reference of some rows, then times it
// (timing.h says how).
//
//   attention_prefill_bench [--check] [--time] [--only NAME] [--json FILE] [--commit ID]
//     [--seconds S]
#include <cmath>
#include <numeric>
#include <random>
#include <string>

#include "backends/cuda/sm90/attention_prefill/attention_prefill.h"
#include "cuda/bench_main.h"
#include "cuda/timing.h"
#include "variants/visibility.h"

namespace fovea::cuda::test {
namespace {

struct Shape {
  std::string name;
  std::int32_t heads = 4, kv_heads = 4;
  std::int32_t qk = 128, pe = 0, v = 128;
  std::vector<std::int32_t> query_lens, seq_lens;
  AttentionVariant variant;
  std::int64_t block_size = 0;  ///< Context in blocks of that many rows; 0: all keys are rows.
};

/// One request after the other; the tiles of all requests, those with most keys first.
std::vector<QueryTile> tiles_of(const Shape& shape) {
  std::vector<QueryTile> tiles;
  std::int32_t query_row = 0, key_row = 0;
  for (std::size_t r = 0; r < shape.query_lens.size(); ++r) {
    const std::int32_t queries = shape.query_lens[r], keys = shape.seq_lens[r];
    const std::int32_t paged = shape.block_size > 0 ? keys - queries : 0;
    for (std::int32_t begin = 0; begin < queries; begin += kPrefillQueryTile) {
      tiles.push_back({query_row + begin, std::min(kPrefillQueryTile, queries - begin),
                       keys - queries + begin, keys, 0, paged,
                       shape.block_size > 0 ? query_row : key_row, static_cast<std::int32_t>(r)});
    }
    query_row += queries;
    key_row += keys;
  }
  std::stable_sort(tiles.begin(), tiles.end(), [&](const QueryTile& a, const QueryTile& b) {
    const auto keys = [&](const QueryTile& t) {
      return visible_to_any(shape.variant, {0, t.num_rows},
                            {t.num_rows, t.num_keys, t.position, t.first_key})
          .size();
    };
    return keys(a) > keys(b);
  });
  return tiles;
}

/// Device memory of a shape. Blocks of a paged context are shuffled.
class Case {
 public:
  Case(const Shape& shape, int copies) : shape(shape) {
    queries_ = std::accumulate(shape.query_lens.begin(), shape.query_lens.end(), std::int64_t{0});
    keys_ = shape.block_size > 0
                ? queries_
                : std::accumulate(shape.seq_lens.begin(), shape.seq_lens.end(), std::int64_t{0});
    params.num_heads = shape.heads;
    params.num_kv_heads = shape.kv_heads;
    params.qk_dim = shape.qk;
    params.pe_dim = shape.pe;
    params.v_dim = shape.v;
    params.sm_scale = 1.f / std::sqrt(static_cast<float>(shape.qk));
    params.variant = shape.variant;
    add(q_, params.q, queries_, shape.heads, shape.qk, copies);
    add(k_, params.k, keys_, shape.kv_heads, shape.qk - shape.pe, copies);
    if (shape.pe > 0) add(k_pe_, params.k_pe, keys_, 1, shape.pe, copies);
    add(v_, params.v, keys_, shape.kv_heads, shape.v, copies);
    if (shape.block_size > 0) add_blocks();
    out_ = DeviceArray<std::uint16_t>(queries_ * shape.heads * shape.v);
    lse_ = DeviceArray<float>(queries_ * shape.heads);
    params.out = out_.data();
    params.out_row_stride = std::int64_t{shape.heads} * shape.v;
    params.out_head_stride = shape.v;
    params.lse = lse_.data();
    params.lse_head_stride = queries_;
    params.lse_row_stride = 1;
    const std::vector<QueryTile> tiles = tiles_of(shape);
    tiles_ = DeviceArray<QueryTile>(tiles);
    params.tiles = tiles_.data();
    params.num_tiles = static_cast<std::int32_t>(tiles.size());
    counter_ = DeviceArray<std::uint32_t>(std::vector<std::uint32_t>{0});
    params.counter = counter_.data();
    params.heads_at_once = prefill_heads_at_once(
        params, *std::max_element(shape.seq_lens.begin(), shape.seq_lens.end()));
  }

  /// Over one of the copies.
  PrefillParams of_copy(int copy) const {
    PrefillParams p = params;
    for (HeadRows* rows : {&p.q, &p.k, &p.k_pe, &p.v}) {
      if (rows->data == nullptr) continue;
      rows->data = static_cast<const std::uint16_t*>(rows->data) +
                   copy * rows->block_size * rows->row_stride;
    }
    return p;
  }

  std::int64_t bytes() const {
    return 2 * (queries_ * shape.heads * shape.qk + keys_ * shape.kv_heads * (shape.qk + shape.v));
  }

  int check() const;

  Shape shape;
  PrefillParams params;

 private:
  void add(DeviceArray<std::uint16_t>& memory, HeadRows& rows, std::int64_t n, std::int64_t heads,
           std::int64_t channels, int copies) {
    memory = DeviceArray<std::uint16_t>(n * heads * channels * copies);
    fill_random<<<1320, 256>>>(memory.data(), memory.size(), ++seed_);
    rows = {memory.data(), channels, heads, n, 1, channels, heads * channels, 0};
  }

  void add_blocks() {
    std::int64_t blocks = 0;
    std::int64_t width = 0;
    std::vector<std::int64_t> of_request;
    for (std::size_t r = 0; r < shape.query_lens.size(); ++r) {
      const std::int64_t context = shape.seq_lens[r] - shape.query_lens[r];
      of_request.push_back((context + shape.block_size - 1) / shape.block_size);
      blocks += of_request.back();
      width = std::max(width, of_request.back());
    }
    std::vector<std::int32_t> ids(blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
    host_table_.assign(of_request.size() * width, 1 << 30);
    for (std::size_t r = 0, next = 0; r < of_request.size(); ++r) {
      for (std::int64_t b = 0; b < of_request[r]; ++b) host_table_[r * width + b] = ids[next++];
    }
    table_ = DeviceArray<std::int32_t>(host_table_);
    params.block_table = table_.data();
    params.block_table_stride = width;
    const auto paged = [&](DeviceArray<std::uint16_t>& memory, HeadRows& rows, std::int64_t d) {
      add(memory, rows, blocks * shape.block_size, shape.kv_heads, d, 1);
      rows.block_size = shape.block_size;
      rows.num_blocks = blocks;
      rows.block_stride = shape.block_size * rows.row_stride;
    };
    paged(k_cache_, params.k_cache, shape.qk);
    paged(v_cache_, params.v_cache, shape.v);
  }

  std::uint32_t seed_ = 0;
  std::int64_t queries_ = 0, keys_ = 0;
  DeviceArray<std::uint16_t> q_, k_, k_pe_, v_, k_cache_, v_cache_, out_;
  DeviceArray<float> lse_;
  DeviceArray<QueryTile> tiles_;
  DeviceArray<std::int32_t> table_;
  DeviceArray<std::uint32_t> counter_;
  std::vector<std::int32_t> host_table_;
};

double bf16(const std::vector<std::uint16_t>& data, std::int64_t at) {
  return decode(ElementType::bf16, data.data(), static_cast<std::size_t>(at));
}

/// Rows of the first and last query of each tile's halves and some between; 0 when all are right.
int Case::check() const {
  out_.poison();
  const auto q = q_.get(), k = k_.get(), v = v_.get();
  const auto k_pe = k_pe_.get(), k_cache = k_cache_.get(), v_cache = v_cache_.get();
  for (int round = 0; round < 2; ++round) {  // The counter must come back to 0.
    check_cuda(attention_prefill_sm90(params, nullptr), shape.name.c_str());
    check_cuda(cudaDeviceSynchronize(), shape.name.c_str());
  }
  const auto out = out_.get();
  const auto lse = lse_.get();
  const std::int32_t group = shape.heads / shape.kv_heads;
  double worst = 0;
  for (const QueryTile& t : tiles_of(shape)) {
    for (std::int32_t row = 0; row < t.num_rows; row += row % 64 == 63 || row % 64 == 0 ? 1 : 31) {
      const std::int64_t query = t.query_row + row;
      const auto head = static_cast<std::int32_t>(query * 7 % shape.heads);
      const std::int32_t kv_head = head / group;
      const KeyInterval keys = visible_keys(shape.variant, row,
                                            {t.num_rows, t.num_keys, t.position, t.first_key});
      std::vector<double> score(keys.size() > 0 ? keys.size() : 0), value(shape.v, 0.0);
      const auto place = [&](std::int64_t key, std::int64_t d) {  // In a cache.
        const std::int64_t block =
            host_table_[t.request * params.block_table_stride + key / shape.block_size];
        return ((block * shape.block_size + key % shape.block_size) * shape.kv_heads + kv_head) * d;
      };
      double max = -INFINITY, sum = 0;
      for (std::int64_t key = keys.begin; key < keys.end; ++key) {
        const bool paged = key < t.num_paged;
        const std::int64_t kv_row = t.first_row + key - t.num_paged;
        double dot = 0;
        for (int d = 0; d < shape.qk; ++d) {
          const int own = shape.qk - shape.pe;
          const double of_key = paged     ? bf16(k_cache, place(key, shape.qk) + d)
                                : d < own ? bf16(k, (kv_row * shape.kv_heads + kv_head) * own + d)
                                          : bf16(k_pe, kv_row * shape.pe + d - own);
          dot += bf16(q, (query * shape.heads + head) * shape.qk + d) * of_key;
        }
        dot *= params.sm_scale;
        if (shape.variant.soft_cap > 0) {
          dot = shape.variant.soft_cap * std::tanh(dot / shape.variant.soft_cap);
        }
        score[key - keys.begin] = dot;
        max = std::max(max, dot);
      }
      for (double& s : score) sum += s = std::exp(s - max);
      for (std::int64_t key = keys.begin; key < keys.end; ++key) {
        const bool paged = key < t.num_paged;
        const std::int64_t kv_row = t.first_row + key - t.num_paged;
        for (int d = 0; d < shape.v; ++d) {
          value[d] += score[key - keys.begin] / sum *
                      (paged ? bf16(v_cache, place(key, shape.v) + d)
                             : bf16(v, (kv_row * shape.kv_heads + kv_head) * shape.v + d));
        }
      }
      double error = 0, norm = 1e-6;
      for (int d = 0; d < shape.v; ++d) {
        const double got = bf16(out, (query * shape.heads + head) * shape.v + d);
        error = std::max(error, std::isnan(got) ? INFINITY : std::abs(got - value[d]));
        norm = std::max(norm, std::abs(value[d]));
      }
      const double want_lse = sum > 0 ? max + std::log(sum) : -INFINITY;
      const double got_lse = lse[head * queries_ + query];
      const bool lse_right = want_lse == got_lse || std::abs(want_lse - got_lse) < 3e-4;
      worst = std::max(worst, error / norm);
      if (error > 0.012 * norm || !lse_right) {
        std::printf("FAIL %s: row %ld head %d: error %g of %g, lse %g expected %g\n",
                    shape.name.c_str(), static_cast<long>(query), head, error, norm, got_lse,
                    want_lse);
        return 1;
      }
    }
  }
  std::printf("ok %s (%.4f)\n", shape.name.c_str(), worst);
  std::fflush(stdout);
  return 0;
}

AttentionVariant causal() { return {}; }
AttentionVariant full() { return {.causal = false}; }
AttentionVariant window(std::int64_t left) { return {.window_left = left}; }

int run_checks(const BenchOptions& options) {
  const Shape shapes[] = {
      {"128/128", 2, 2, 128, 0, 128, {128}, {128}, full()},
      {"128/128 causal", 4, 2, 128, 0, 128, {1000}, {1000}, causal()},
      {"64/64 causal", 4, 2, 64, 0, 64, {700, 300}, {700, 900}, causal()},
      {"192/128 causal", 6, 6, 192, 64, 128, {1000, 64}, {1000, 2000}, causal()},
      {"256/256 causal", 3, 1, 256, 0, 256, {500, 129}, {777, 129}, causal()},
      {"192/128 full, ragged", 16, 16, 192, 64, 128, {300, 1, 65, 2}, {3000, 7, 64, 0}, full()},
      {"window 127", 8, 2, 128, 0, 128, {2000}, {2000}, window(127)},
      {"window 0", 8, 2, 64, 0, 64, {300}, {1000}, window(0)},
      {"chunk 256, cap", 8, 2, 128, 0, 128, {900}, {900},
       {.attention_chunk = 256, .soft_cap = 3.f}},
      {"paged 64", 8, 2, 128, 0, 128, {300, 200}, {1000, 250}, causal(), 64},
      {"paged 1, window", 8, 2, 256, 0, 256, {100, 50}, {300, 51}, window(100), 1},
      {"paged 48", 8, 2, 64, 0, 64, {300, 200}, {1000, 250}, causal(), 48},
      {"paged 256", 8, 2, 128, 0, 128, {300}, {2000}, full(), 256},
      {"many items", 128, 128, 192, 64, 128, {1500}, {1500}, causal()}};
  int failures = 0;
  for (const Shape& shape : shapes) {
    if (!options.takes(shape.name)) continue;
    const Case c(shape, 1);
    if (const char* reason = attention_prefill_sm90_declines(c.params)) {
      std::printf("FAIL %s declined: %s\n", shape.name.c_str(), reason);
      ++failures;
      continue;
    }
    failures += c.check();
  }
  std::printf("%d failed\n", failures);
  return failures;
}

/// 2 x heads x (d_qk + d_v) for each key that a query sees; causal squares as half.
double flop(const Shape& shape) {
  const double queries = shape.query_lens[0], keys = shape.seq_lens[0];
  double seen = queries * keys;
  if (shape.variant.window_left >= 0) {
    seen = queries * static_cast<double>(shape.variant.window_left + 1);
  } else if (shape.variant.causal) {
    seen /= 2;
  }
  return 2 * seen * shape.heads * (shape.qk + shape.v);
}

void run_timings(const BenchOptions& options) {
  const Shape shapes[] = {
      {"prefill_192_128_h128_causal_8192", 128, 128, 192, 64, 128, {8192}, {8192}, causal()},
      {"prefill_128_32_8_causal_16384", 32, 8, 128, 0, 128, {16384}, {16384}, causal()},
      {"prefill_128_64_8_16384_w127", 64, 8, 128, 0, 128, {16384}, {16384}, window(127)},
      {"prefill_192_128_h128_full_8192", 128, 128, 192, 64, 128, {8192}, {8192}, full()},
      {"prefill_128_32_8_full_8192", 32, 8, 128, 0, 128, {8192}, {8192}, full()},
      {"prefill_64_32_8_causal_16384", 32, 8, 64, 0, 64, {16384}, {16384}, causal()},
      {"prefill_256_16_4_causal_8192", 16, 4, 256, 0, 256, {8192}, {8192}, causal()}};
  std::vector<std::string> results;
  for (const Shape& shape : shapes) {
    if (!options.takes(shape.name)) continue;
    const std::int64_t bytes = Case(shape, 1).bytes();
    const int copies = copies_beyond_cache(static_cast<std::size_t>(bytes));
    const Case c(shape, copies);
    const double us = time_per_call(copies, options.seconds, [&](int copy, cudaStream_t stream) {
      PrefillParams p = c.of_copy(copy);
      p.lse = nullptr;
      check_cuda(attention_prefill_sm90(p, stream), "run");
    });
    const double tflops = flop(shape) / us * 1e-6;
    std::printf("%-38s %9.2f us %7.1f TF\n", shape.name.c_str(), us, tflops);
    std::fflush(stdout);
    char line[160];
    std::snprintf(line, sizeof line, "{\"name\": \"%s\", \"us\": %.3f, \"tflops\": %.2f}",
                  shape.name.c_str(), us, tflops);
    results.push_back(line);
  }
  write_results(options, results);
}

}  // namespace
}  // namespace fovea::cuda::test

int main(int argc, char** argv) {
  using namespace fovea::cuda::test;  // NOLINT(google-build-using-namespace)
  const BenchOptions options = parse_options(argc, argv, false);
  const int failures = options.check ? run_checks(options) : 0;
  if (options.time) run_timings(options);
  return failures == 0 ? 0 : 1;
}
