// Checks grouped-query decode against a float64 reference, then times it (timing.h says how).
//
//   attention_decode_bench [--check] [--time] [--only NAME] [--json FILE] [--commit ID]
//     [--seconds S]
#include <random>
#include <string>
#include <vector>

#include "cuda/attention_decode_data.h"
#include "cuda/bench_main.h"
#include "cuda/timing.h"

namespace fovea::cuda::test {
namespace {

int run_checks(const BenchOptions& options) {
  std::vector<std::int32_t> ones(200, 1), lens;
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) lens.push_back(static_cast<std::int32_t>(random() % 300));
  const AttentionVariant causal, full{.causal = false};
  const Shape shapes[] = {
      {"one key", 8, 2, 128, {1}, {1}},
      {"one tile", 8, 2, 128, {1}, {64}},
      {"long", 8, 2, 128, {1}, {5001}},
      {"64 channels", 16, 4, 64, {1, 1}, {1000, 70}},
      {"256 channels", 16, 4, 256, {1, 1}, {1000, 70}},
      {"zero lengths", 8, 8, 128, {1, 1, 0, 1}, {0, 130, 40, 0}, 16},
      {"tokens", 32, 8, 128, {4, 1, 7, 2}, {900, 65, 70, 1}, 32},
      {"tokens, not causal", 32, 8, 128, {4, 1, 7, 2}, {900, 65, 70, 1}, 32, full},
      {"more tokens than keys", 8, 2, 64, {5, 3}, {2, 70}, 64},
      {"group of 20", 20, 1, 128, {1, 2}, {300, 500}, 48},
      {"blocks of 1", 8, 2, 128, {1, 1}, {333, 130}, 1},
      {"blocks of 3", 8, 2, 64, {1, 1}, {333, 130}, 3},
      {"blocks of 256", 8, 2, 128, {1, 1}, {1333, 130}, 256},
      {"window 127, sinks", 64, 8, 128, {1, 3}, {1333, 130}, 64, {.window_left = 127}, true},
      {"window 0", 8, 8, 128, {1, 3}, {1333, 130}, 16, {.window_left = 0}, true},
      {"chunk, cap", 8, 2, 128, {1, 3}, {1000, 258}, 16,
       {.attention_chunk = 256, .soft_cap = 3.f}},
      {"many requests", 8, 2, 128, ones, lens, 16, causal}};
  std::vector<Shape> all(std::begin(shapes), std::end(shapes));
  for (const std::int32_t query_len : {1, 5, 16, 61, 64}) {
    for (const AttentionVariant& variant : {causal, AttentionVariant{.window_left = 40}}) {
      Shape shape{"tree of " + std::to_string(query_len), 8, 2, 128, {query_len, 3, 1},
                  {1333, 130, 40}, 48, variant};
      shape.query_lens.push_back(query_len);
      shape.seq_lens.push_back(query_len + 2);
      shape.tree = binary_trees(shape.query_lens);
      all.push_back(shape);
    }
  }
  const std::pair<CacheFormat, const char*> formats[] = {{CacheFormat::fp8_e4m3, "fp8"},
                                                        {CacheFormat::fp8_e5m2, "e5m2"},
                                                        {CacheFormat::fp8_per_token, "fp8 token"},
                                                        {CacheFormat::int8_per_token, "int8"},
                                                        {CacheFormat::int4_per_token, "int4"}};
  for (const auto& [format, name] : formats) {
    for (const int dim : {64, 128, 256}) {
      Shape shape{name + (" " + std::to_string(dim)), 8, 2, dim, {1, 3}, {1333, 130}, 48};
      shape.format = format;
      all.push_back(shape);
      shape.name += ", tree";
      shape.tree = binary_trees(shape.query_lens);
      all.push_back(shape);
    }
  }
  int failures = 0;
  for (const Shape& shape : all) {
    if (!options.takes(shape.name)) continue;
    const Case c(shape, 1);
    if (const char* reason = attention_decode_sm90_declines(c.params)) {
      std::printf("FAIL %s declined: %s\n", shape.name.c_str(), reason);
      ++failures;
      continue;
    }
    failures += c.check();
  }
  std::printf("%d failed\n", failures);
  return failures;
}

Shape timed(const std::string& name, int batch, int heads, int kv, AttentionVariant variant = {},
            CacheFormat format = CacheFormat::dense) {
  Shape shape{name, heads, 8, 128};
  shape.query_lens.assign(batch, 1);
  shape.seq_lens.assign(batch, kv);
  shape.variant = variant;
  shape.format = format;
  return shape;
}

void run_timings(const BenchOptions& options) {
  const Shape shapes[] = {
      timed("gqa_decode_b128_32_8_kv16384", 128, 32, 16384),
      timed("gqa_decode_b128_64_8_kv8192_w127", 128, 64, 8192, {.window_left = 127}),
      timed("gqa_decode_b128_64_8_kv8192", 128, 64, 8192),
      timed("gqa_decode_b1_32_8_kv32768", 1, 32, 32768),
      timed("gqa_decode_b8_32_8_kv8192", 8, 32, 8192),
      timed("gqa_decode_fp8_e4m3_b128_64_8_kv8192", 128, 64, 8192, {}, CacheFormat::fp8_e4m3),
      timed("gqa_decode_int8_per_token_b128_64_8_kv8192", 128, 64, 8192, {},
            CacheFormat::int8_per_token),
      timed("gqa_decode_int4_per_token_b128_64_8_kv8192", 128, 64, 8192, {},
            CacheFormat::int4_per_token)};
  std::vector<std::string> results;
  for (const Shape& shape : shapes) {
    if (!options.takes(shape.name)) continue;
    // A window leaves most rows unread: copies are counted by what is read.
    const double visible = shape.variant.window_left < 0
                               ? 1.0 * shape.seq_lens[0]
                               : static_cast<double>(shape.variant.window_left + 1);
    const double read = visible * static_cast<double>(shape.seq_lens.size()) * shape.kv_heads *
                        static_cast<double>(shape.head_bytes() * 2);
    const int copies = copies_beyond_cache(static_cast<std::size_t>(read));
    const int held = shape.variant.window_left < 0 ? copies : std::min(copies, 4);
    const Case c(shape, held);
    const double us = time_per_call(held, options.seconds, [&](int copy, cudaStream_t stream) {
      c.run(copy, stream);
    });
    const double tb_s = read / us * 1e-6;
    std::printf("%-46s %9.2f us %7.3f TB/s\n", shape.name.c_str(), us, tb_s);
    std::fflush(stdout);
    char line[160];
    std::snprintf(line, sizeof line, "{\"name\": \"%s\", \"us\": %.3f, \"tb_s\": %.4f}",
                  shape.name.c_str(), us, tb_s);
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
