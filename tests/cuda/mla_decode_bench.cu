// Checks MLA decode against a float64 reference, then times it (timing.h says how).
//
//   mla_decode_bench [--check] [--time] [--sweep] [--only NAME] [--json FILE] [--commit ID]
#include <algorithm>

#include "backends/cuda/sm90/mla_decode/mla_decode.h"
#include "cuda/bench_main.h"
#include "cuda/draft_trees.h"
#include "cuda/mla_decode_data.h"
#include "cuda/timing.h"

namespace fovea::cuda::test {
namespace {

int failures = 0;
int checks = 0;

/// The sm90 kernel in one geometry: plan and run, twice over the same workspace.
void check_geometry(Case& c, const Reference& ref, const MlaDecodeGeometry& g,
                    const std::string& what) {
  DeviceArray<std::uint8_t> workspace(mla_decode_sm90_workspace_bytes(g));
  workspace.poison();
  check_cuda(mla_decode_sm90_plan(c.params, g, workspace.data(), nullptr), "plan");
  for (int round = 0; round < 2; ++round) {
    c.d_out.poison();
    c.d_lse.poison();
    check_cuda(mla_decode_sm90(c.params, g, workspace.data(), nullptr), what.c_str());
    check_cuda(cudaDeviceSynchronize(), what.c_str());
    ++checks;
    if (!matches(c, ref, what + (round == 0 ? "" : " (second run)"))) {
      ++failures;
      return;
    }
  }
}

std::string describe(const MlaDecodeGeometry& g) {
  return " rows " + std::to_string(g.rows) + " tiles " + std::to_string(g.row_tiles_per_group) +
         " groups " + std::to_string(g.num_groups);
}

BenchOptions options;

void check_case(const CaseShape& shape, std::uint32_t seed) {
  if (!options.takes(shape.name)) return;
  Case c(shape, seed);
  const Reference ref = reference(c);
  if (const char* reason = mla_decode_sm90_declines(c.params)) {
    std::printf("FAIL %s declined: %s\n", shape.name.c_str(), reason);
    ++failures;
    return;
  }
  MlaDecodeGeometry best;
  check_cuda(mla_decode_sm90_geometry(c.params, &best), "geometry");
  check_geometry(c, ref, best, shape.name + describe(best));
  if (shape.format != CacheFormat::dense) {
    const MlaDecodeGeometry few[] = {{16, 1, 144}, {16, 1, 5}, {16, 2, 66}, {16, 2, 7}};
    for (const MlaDecodeGeometry& g : few) check_geometry(c, ref, g, shape.name + describe(g));
    return;
  }
  // More groups than the device holds at once are right, too: early ones leave their merges.
  const MlaDecodeGeometry others[] = {{16, 1, 144}, {16, 1, 5},  {32, 1, 132}, {32, 1, 3},
                                      {64, 2, 72},  {64, 1, 16}, {64, 2, 7},   {64, 1, 1}};
  for (const MlaDecodeGeometry& g : others) check_geometry(c, ref, g, shape.name + describe(g));
}

/// A captured plan and run must follow lengths that change between replays, down to zero.
void check_replay() {
  CaseShape shape{"replay", 20, {1, 2, 1, 3}, {700, 900, 130, 2000}};
  Case c(shape, 99);
  MlaDecodeGeometry g;
  check_cuda(mla_decode_sm90_geometry(c.params, &g), "geometry");
  DeviceArray<std::uint8_t> workspace(mla_decode_sm90_workspace_bytes(g));
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check_cuda(cudaStreamCreate(&stream), "stream");
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  check_cuda(mla_decode_sm90_plan(c.params, g, workspace.data(), stream), "plan");
  check_cuda(mla_decode_sm90(c.params, g, workspace.data(), stream), "run");
  check_cuda(cudaStreamEndCapture(stream, &graph), "end capture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  const std::vector<std::int32_t> lens[] = {
      {700, 900, 130, 2000}, {1, 2, 0, 3}, {0, 0, 0, 0}, {64, 65, 63, 1999}};
  const std::vector<std::int32_t> starts[] = {
      {0, 1, 3, 4, 7}, {0, 1, 3, 3, 6}, {0, 0, 0, 0, 0}, {0, 2, 2, 3, 6}};
  for (int i = 0; i < 4; ++i) {
    c.shape.seq_lens = lens[i];
    c.starts = starts[i];
    c.d_lens.set(lens[i]);
    c.d_starts.set(starts[i]);
    c.d_out.poison();
    c.d_lse.poison();
    check_cuda(cudaGraphLaunch(exec, stream), "graph");
    check_cuda(cudaStreamSynchronize(stream), "graph");
    ++checks;
    if (!matches(c, reference(c), "replay " + std::to_string(i))) ++failures;
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

void check_format(CacheFormat format, const std::string& name, std::uint32_t& seed) {
  constexpr auto bf16 = ElementType::bf16;
  constexpr auto f16 = ElementType::f16;
  constexpr auto f32 = ElementType::f32;
  const auto check = [&](CaseShape shape) {
    shape.name = name + " " + shape.name;
    shape.format = format;
    check_case(shape, ++seed);
  };
  check({"one key", 16, {1}, {1}});
  check({"long", 16, {1, 1}, {3001, 64}, 64, bf16, f32});
  CaseShape tiles{"1 to 13 tiles", 16};
  tiles.query_lens.assign(26, 1);
  for (std::int32_t n = 1; n <= 26; ++n) tiles.seq_lens.push_back(n % 2 ? 32 * n - 31 : 32 * n);
  check(tiles);
  if (format != CacheFormat::fp8_ds_mla) {
    check({"f16 queries, 40 heads", 40, {1, 2}, {700, 300}, 64, f16, f16});
  }
  check({"zero lengths", 12, {1, 1, 0, 1}, {0, 130, 40, 0}, 16, bf16, bf16, true, true, 2});
  check({"large queries", 16, {1, 1}, {400, 1500}, 64, bf16, f32, true, true, 0, 0, 3e4f});
  check({"tiny queries", 16, {1, 1}, {400, 1500}, 64, bf16, f32, true, true, 0, 0, 1e-20f});
  check({"gaps", 16, {1, 2}, {300, 500}, 64, bf16, bf16, false, true, 0, 64});
  CaseShape odd{"f32 rows at odd offsets", 16, {1, 2}, {300, 500}, 64, bf16, f32};
  odd.out_gap = 7;
  check(odd);
  for (const std::int64_t block : {1, 3, 16, 61, 128}) {
    check({"block " + std::to_string(block), 16, {1, 1}, {333, 130}, block, bf16, bf16});
  }
  CaseShape nan{"NaN that the last query token alone sees", 24, {5, 1, 2}, {300, 77, 65}, 64};
  nan.last_key_nan = true;
  check(nan);
  nan.window_left = 33;
  nan.with_sinks = true;
  check(nan);
  CaseShape tree{"draft trees", 24, {5, 1, 64}, {300, 77, 101}, 64};
  tree.tree = binary_trees(tree.query_lens);
  tree.last_key_nan = true;
  check(tree);
  tree.window_left = 30;
  check(tree);
}

/// Windows, sinks, draft trees, and keys that are NaN.
void check_variants(std::uint32_t& seed) {
  constexpr auto bf16 = ElementType::bf16;
  constexpr auto f16 = ElementType::f16;
  constexpr auto f32 = ElementType::f32;
  {
    CaseShape c{"windows", 16, {1, 1, 3, 1}, {900, 40, 200, 128}, 32, bf16, bf16};
    for (const std::int32_t window : {0, 1, 63, 64, 127, 500}) {
      c.name = "window " + std::to_string(window);
      c.window_left = window;
      check_case(c, ++seed);
    }
    c.name = "window, sinks, not causal";
    c.causal = false;
    c.with_sinks = true;
    c.window_left = 70;
    check_case(c, ++seed);
  }
  {
    CaseShape c{"sinks", 40, {1, 3, 1}, {900, 700, 0}, 64, bf16, f32};
    c.with_sinks = true;
    check_case(c, ++seed);
  }
  {
    CaseShape c{"NaN that the last query token alone sees", 24, {5, 1, 2}, {300, 77, 65}, 64};
    c.last_key_nan = true;
    check_case(c, ++seed);
    c.type = c.out_type = f16;
    c.window_left = 20;
    check_case(c, ++seed);
  }
  // Tiles of 16, 32 and 64 rows.
  for (const std::int32_t query_len : {1, 7, 16, 31, 64}) {
    for (const std::int32_t heads : {1, 4, 20}) {
      CaseShape c{"draft trees of " + std::to_string(query_len) + ", heads " +
                      std::to_string(heads),
                  heads, {query_len, 1, query_len}, {300, 77, query_len + 37}, 32};
      c.tree = binary_trees(c.query_lens);
      check_case(c, ++seed);
      c.window_left = 40;
      c.last_key_nan = true;
      check_case(c, ++seed);
    }
  }
}

void run_checks() {
  constexpr auto bf16 = ElementType::bf16;
  constexpr auto f16 = ElementType::f16;
  constexpr auto f32 = ElementType::f32;
  std::uint32_t seed = 1;
  check_case({"one key", 16, {1}, {1}}, ++seed);
  check_case({"one tile", 16, {1}, {64}}, ++seed);
  check_case({"a long one", 16, {1}, {3001}}, ++seed);
  check_case({"128 heads", 128, {1, 1}, {1000, 777}, 64, bf16, f32}, ++seed);
  check_case({"f16", 64, {1, 1, 1}, {500, 1, 260}, 16, f16, f16}, ++seed);
  check_case({"f16 to f32, 16 heads", 16, {1, 1, 1}, {500, 1, 260}, 32, f16, f32}, ++seed);
  check_case({"zero lengths", 12, {1, 1, 1, 1}, {0, 130, 0, 70}, 16, bf16, bf16}, ++seed);
  check_case({"all empty", 12, {1, 1}, {0, 0}}, ++seed);
  check_case({"requests without queries, padding", 9, {0, 2, 0, 1, 0}, {50, 300, 9, 200, 0}, 16,
              bf16, bf16, true, true, 3},
             ++seed);
  check_case({"ragged causal", 24, {1, 4, 2, 7}, {900, 4, 333, 65}, 32, bf16, f32}, ++seed);
  check_case(
      {"ragged not causal", 24, {1, 4, 2, 7}, {900, 4, 333, 65}, 32, bf16, bf16, true, false},
      ++seed);
  check_case({"more queries than keys", 16, {5, 3}, {2, 70}, 64, bf16, f32}, ++seed);
  check_case({"one winner", 16, {1, 1}, {400, 1500}, 64, bf16, f32, true, true, 0, 0, 40.f},
             ++seed);
  check_case({"gaps, no lse", 40, {1, 2}, {300, 500}, 64, bf16, bf16, false, true, 0, 128}, ++seed);
  for (const std::int32_t heads : {1, 3, 20, 63, 126}) {
    check_case({"heads " + std::to_string(heads), heads, {1, 2}, {210, 450}, 64, bf16, bf16},
               ++seed);
  }
  for (const std::int64_t block : {1, 2, 3, 48, 61, 128, 256}) {
    check_case({"block " + std::to_string(block), 16, {1, 1}, {333, 130}, block, bf16, bf16},
               ++seed);
  }
  check_variants(seed);
  CaseShape many{"many requests", 16};
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    many.query_lens.push_back(1);
    many.seq_lens.push_back(static_cast<std::int32_t>(random() % 300));
  }
  check_case(many, ++seed);
  check_format(CacheFormat::int8_per_token, "int8", seed);
  check_format(CacheFormat::fp8_e4m3, "fp8", seed);
  check_format(CacheFormat::fp8_e5m2, "e5m2", seed);
  check_format(CacheFormat::fp8_per_token, "fp8 token", seed);
  check_format(CacheFormat::int4_per_token, "int4", seed);
  check_format(CacheFormat::fp8_ds_mla, "ds_mla", seed);
  if (options.only.empty()) check_replay();
  std::printf("%d checks, %d failed\n", checks, failures);
}

// ------------------------------------------------------------------------------------ timing

struct TimedShape {
  std::int32_t batch, heads, kv, query_len;
  CacheFormat format = CacheFormat::dense;
};

struct Timing {
  std::string name;
  TimedShape shape;
  MlaDecodeGeometry geometry;
  double us = 0, tb_s = 0, tflops = 0;
};

/// Device memory of a timed shape: equal lengths, shuffled blocks of 64, several copies.
class TimedCase {
 public:
  explicit TimedCase(const TimedShape& s) : shape_(s) {
    const std::int64_t blocks = std::int64_t{s.batch} * (s.kv / 64);
    const std::size_t bytes = static_cast<std::size_t>(blocks) * 64 * row_bytes(s.format);
    copies_ = copies_beyond_cache(bytes);
    cache_ = DeviceArray<std::uint8_t>(bytes * copies_);
    query_ = DeviceArray<std::uint16_t>(std::size_t{1} * s.batch * s.query_len * s.heads * kRow);
    if (s.format == CacheFormat::dense) {
      fill_random<<<1320, 256>>>(reinterpret_cast<std::uint16_t*>(cache_.data()), cache_.size() / 2,
                                 1);
    } else {
      fill_rows<<<1320, 256>>>(cache_.data(), cache_.size() / row_bytes(s.format), s.format,
                               static_cast<int>(row_bytes(s.format)));
    }
    fill_random<<<1320, 256>>>(query_.data(), query_.size(), 2);
    std::vector<std::int32_t> ids(blocks), starts(s.batch + 1), lens(s.batch, s.kv);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(7));
    for (int i = 0; i <= s.batch; ++i) starts[i] = i * s.query_len;
    table_ = DeviceArray<std::int32_t>(ids);
    starts_ = DeviceArray<std::int32_t>(starts);
    lens_ = DeviceArray<std::int32_t>(lens);
    out_ = DeviceArray<std::uint16_t>(std::size_t{1} * s.batch * s.query_len * s.heads * kLatent);
    MlaDecodeParams& p = params_;
    p.num_requests = s.batch;
    p.num_tokens = s.batch * s.query_len;
    p.num_heads = s.heads;
    p.latent_dim = kLatent;
    p.rope_dim = kRope;
    p.max_query_len = s.query_len;
    p.query_start_loc = starts_.data();
    p.seq_lens = lens_.data();
    p.q_latent = query_.data();
    p.q_pe = query_.data() + kLatent;
    p.q_latent_token_stride = p.q_pe_token_stride = std::int64_t{s.heads} * kRow;
    p.q_latent_head_stride = p.q_pe_head_stride = kRow;
    p.num_blocks = blocks;
    p.block_size = 64;
    p.cache_format = s.format;
    p.cache_row_stride = s.format == CacheFormat::dense ? kRow : row_bytes(s.format);
    p.cache_block_stride = 64 * p.cache_row_stride;
    p.block_table = table_.data();
    p.block_table_stride = s.kv / 64;
    p.out = out_.data();
    p.out_head_stride = kLatent;
    p.out_token_stride = std::int64_t{s.heads} * kLatent;
    p.sm_scale = 1.f / std::sqrt(192.f);
    p.cache = cache_.data();
    copy_bytes_ = bytes;
  }

  const MlaDecodeParams& params() const { return params_; }

  Timing time(const std::string& name, const MlaDecodeGeometry& g, double seconds) {
    DeviceArray<std::uint8_t> workspace(mla_decode_sm90_workspace_bytes(g));
    check_cuda(mla_decode_sm90_plan(params_, g, workspace.data(), nullptr), "plan");
    const double us = time_per_call(copies_, seconds, [&](int copy, cudaStream_t stream) {
      MlaDecodeParams p = params_;
      p.cache = cache_.data() + copy_bytes_ * copy;
      check_cuda(mla_decode_sm90(p, g, workspace.data(), stream), "run");
    });
    Timing t{name, shape_, g};
    t.us = us;
    const double keys = 1.0 * shape_.batch * shape_.kv;
    t.tb_s = keys * static_cast<double>(row_bytes(shape_.format)) / t.us * 1e-6;
    t.tflops = 2 * keys * shape_.query_len * shape_.heads * (kRow + kLatent) / t.us * 1e-6;
    return t;
  }

 private:
  TimedShape shape_;
  int copies_ = 1;
  std::size_t copy_bytes_ = 0;
  DeviceArray<std::uint8_t> cache_;
  DeviceArray<std::uint16_t> query_, out_;
  DeviceArray<std::int32_t> table_, starts_, lens_;
  MlaDecodeParams params_;
};

void print(const Timing& t, const char* mark) {
  std::printf("%-38s %9.2f us %6.3f TB/s %7.1f TF %s%s\n", t.name.c_str(), t.us, t.tb_s, t.tflops,
              mark, describe(t.geometry).c_str());
  std::fflush(stdout);
}

std::string json_of(const Timing& t) {
  char line[320];
  std::snprintf(line, sizeof line,
                "{\"name\": \"%s\", \"us\": %.3f, \"tb_s\": %.4f, \"tflops\": %.2f, \"rows\": %d, "
                "\"row_tiles_per_group\": %d, \"num_groups\": %d}",
                t.name.c_str(), t.us, t.tb_s, t.tflops, t.geometry.rows,
                t.geometry.row_tiles_per_group, t.geometry.num_groups);
  return line;
}

void run_timings() {
  const TimedShape shapes[] = {
      {1, 16, 4096, 1},    {1, 16, 32768, 1},   {1, 128, 32768, 1},  {8, 16, 8192, 1},
      {128, 16, 8192, 1},  {128, 128, 8192, 1}, {1, 128, 4096, 1},   {32, 16, 8192, 1},
      {32, 128, 8192, 1},  {128, 64, 8192, 1},  {128, 16, 8192, 4},  {128, 32, 8192, 1},
      {128, 16, 8192, 1, CacheFormat::int8_per_token},
      {128, 16, 8192, 1, CacheFormat::fp8_e4m3},
      {128, 16, 8192, 1, CacheFormat::int4_per_token},
      {128, 16, 8192, 1, CacheFormat::fp8_ds_mla},
      {8, 16, 8192, 1, CacheFormat::int8_per_token},
      {128, 128, 8192, 1, CacheFormat::fp8_e4m3}};
  std::vector<std::string> results;
  for (const TimedShape& s : shapes) {
    constexpr const char* kFormats[] = {
        "bf16", "fp8_e4m3", "fp8_e5m2", "int8_per_token", "int4_per_token", "fp8_per_token",
        "fp8_ds_mla"};
    std::string name = std::string("mla_decode_") + kFormats[static_cast<int>(s.format)] + "_b" +
                       std::to_string(s.batch) + "_h" + std::to_string(s.heads) + "_kv" +
                       std::to_string(s.kv);
    if (s.query_len > 1) name += "_q" + std::to_string(s.query_len);
    if (!options.takes(name)) continue;
    TimedCase c(s);
    MlaDecodeGeometry best;
    check_cuda(mla_decode_sm90_geometry(c.params(), &best), "geometry");
    const Timing timing = c.time(name, best, options.seconds);
    results.push_back(json_of(timing));
    print(timing, "");
    if (!options.sweep) continue;
    for (const int blocks : {132, 128, 120, 112, 96, 80, 64, 32, 16}) {
      MlaDecodeGeometry g = best;
      g.num_groups = blocks / g.row_tiles_per_group;
      if (g.num_groups != best.num_groups) print(c.time(name, g, options.seconds / 2), "sweep");
    }
  }
  write_results(options, results);
}

}  // namespace
}  // namespace fovea::cuda::test

int main(int argc, char** argv) {
  using namespace fovea::cuda::test;  // NOLINT(google-build-using-namespace)
  options = parse_options(argc, argv, true);
  if (options.check) run_checks();
  if (options.time) run_timings();
  return failures == 0 ? 0 : 1;
}
