// Inputs for MLA decode checks and timings, and the float64 reference.
//
// Whatever no request owns is NaN or garbage: unused rows and blocks, gaps between rows,
// block-table tails, outputs before the run.
#pragma once

#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/sm90/mla_decode/params.h"
#include "cuda/device_array.h"
#include "cuda/latent_rows.h"
#include "variants/visibility.h"

namespace fovea::cuda::test {

struct CaseShape {
  std::string name;
  std::int32_t heads = 16;
  std::vector<std::int32_t> query_lens;
  std::vector<std::int32_t> seq_lens;
  std::int64_t block_size = 64;
  ElementType type = ElementType::bf16;
  ElementType out_type = ElementType::bf16;
  bool with_lse = true;
  bool causal = true;
  std::int32_t unused_tokens = 0;  ///< Rows past the last request.
  std::int64_t row_gap = 0;        ///< Elements between cache rows.
  float spread = 1.f;              ///< Of the queries: large ones make one key win.
  std::int32_t window_left = -1;
  bool with_sinks = false;  ///< Of all sizes, infinite ones among them.
  CacheFormat format = CacheFormat::dense;
  bool last_key_nan =
      false;  ///< Of each request with several query tokens: earlier ones are clean.
  std::vector<std::uint64_t> tree;  ///< Of all query tokens; empty: none.
  std::int64_t out_gap = 8;         ///< Elements between output rows.

  std::int64_t out_stride() const { return kLatent + out_gap; }
};

/// One case on the host and on the device. Queries are one [T, N, 576] tensor, outputs have gaps.
struct Case {
  CaseShape shape;
  std::vector<std::int32_t> starts, table;
  std::int64_t table_width = 0, num_blocks = 0, row_stride = 0;
  std::int32_t tokens = 0;
  std::vector<std::uint16_t> query;
  std::vector<std::uint8_t> cache;
  DeviceArray<std::uint16_t> d_query;
  DeviceArray<std::uint8_t> d_cache;
  DeviceArray<std::int32_t> d_starts, d_lens, d_table;
  DeviceArray<std::uint64_t> d_tree;
  DeviceArray<std::uint8_t> d_out;
  DeviceArray<float> d_lse, d_sinks;
  std::vector<float> sinks;
  MlaDecodeParams params;

  explicit Case(CaseShape s, std::uint32_t seed) : shape(std::move(s)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto b = shape.seq_lens.size();
    starts.assign(1, 0);
    for (const std::int32_t n : shape.query_lens) starts.push_back(starts.back() + n);
    tokens = starts.back() + shape.unused_tokens;

    std::int64_t used = 0;
    for (const std::int32_t n : shape.seq_lens) {
      const std::int64_t blocks = (n + shape.block_size - 1) / shape.block_size;
      used += blocks;
      table_width = std::max(table_width, blocks);
    }
    table_width += 3;
    num_blocks = used + 5;
    row_stride = row_bytes(shape.format) + shape.row_gap;  // Bytes.
    std::vector<std::int32_t> ids(num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);

    constexpr std::int32_t kGarbage = 2147480000;
    table.assign(b * table_width, kGarbage);
    cache.assign(num_blocks * shape.block_size * row_stride, 0xff);  // NaN in all types and scales.
    query.resize(std::size_t{1} * tokens * shape.heads * kRow);
    for (auto& q : query) q = encode(shape.type, shape.spread * normal(random));
    for (std::size_t i = starts.back() * std::size_t{1} * shape.heads * kRow; i < query.size(); ++i)
      query[i] = 0xffff;
    std::size_t next = 0;
    for (std::size_t r = 0; r < b; ++r) {
      for (std::int32_t k = 0; k < shape.seq_lens[r]; ++k) {
        std::int32_t& id = table[r * table_width + k / shape.block_size];
        if (k % shape.block_size == 0) id = ids[next++];
        std::uint8_t* row = &cache[row_at(r, k)];
        const bool nan =
            shape.last_key_nan && shape.query_lens[r] > 1 && k + 1 == shape.seq_lens[r];
        if (shape.format != CacheFormat::dense) {
          fill_quantized_row(shape.format, row, nan, random);
          continue;
        }
        for (int d = 0; d < kRow; ++d) {
          const std::uint16_t bits = encode(shape.type, normal(random));
          std::memcpy(row + 2 * d, &bits, 2);
        }
        if (nan) std::memset(row + 2 * (random() % kRow), 0xff, 2);
      }
    }
    for (std::int32_t head = 0; head < shape.heads; ++head) {
      constexpr float kSinks[] = {0.f, -INFINITY, 3.f, INFINITY, -50.f, 100.f, 0.5f};
      sinks.push_back(kSinks[random() % 7]);
    }
    upload();
  }

  /// Where the row of a request's key begins, in bytes.
  std::int64_t row_at(std::size_t request, std::int32_t key) const {
    const std::int64_t id = table[request * table_width + key / shape.block_size];
    return (id * shape.block_size + key % shape.block_size) * row_stride;
  }

  double element(std::int64_t row, int d) const {
    const std::uint8_t* bytes = cache.data() + row;
    if (shape.format == CacheFormat::dense) return decode(shape.type, bytes, d);
    float scale;
    if (shape.format == CacheFormat::fp8_e4m3 || shape.format == CacheFormat::fp8_e5m2 ||
        shape.format == CacheFormat::fp8_per_token) {
      scale = params.cache_scale;
      if (shape.format == CacheFormat::fp8_per_token) {
        std::memcpy(&scale, bytes + kRow + (d < kLatent ? 0 : 4), 4);
      }
      const __half_raw half = __nv_cvt_fp8_to_halfraw(bytes[d], fp8_of(shape.format));
      return double{__half2float(__half(half))} * scale;
    }
    if (shape.format == CacheFormat::fp8_ds_mla) {
      if (d >= kLatent) return decode(ElementType::bf16, bytes + kLatent + 16, d - kLatent);
      std::memcpy(&scale, bytes + kLatent + d / 128 * 4, 4);
      const __half_raw half = __nv_cvt_fp8_to_halfraw(bytes[d], __NV_E4M3);
      return double{__half2float(__half(half))} * double{scale};
    }
    const bool bytewise = shape.format == CacheFormat::int8_per_token;
    std::memcpy(&scale, bytes + (bytewise ? kRow : kRow / 2) + (d < kLatent ? 0 : 4), 4);
    const int code = bytewise ? static_cast<std::int8_t>(bytes[d])
                              : ((bytes[d / 2] >> (d % 2 * 4) & 15) ^ 8) - 8;
    return double{scale} * code;
  }

  void upload() {
    d_query = DeviceArray<std::uint16_t>(query);
    d_cache = DeviceArray<std::uint8_t>(cache);
    d_starts = DeviceArray<std::int32_t>(starts);
    d_lens = DeviceArray<std::int32_t>(shape.seq_lens);
    d_table = DeviceArray<std::int32_t>(table);
    d_tree = DeviceArray<std::uint64_t>(shape.tree);
    const std::size_t out_elements = std::size_t{1} * tokens * shape.heads * shape.out_stride();
    d_out = DeviceArray<std::uint8_t>(out_elements * (shape.out_type == ElementType::f32 ? 4 : 2));
    d_lse = DeviceArray<float>(std::size_t{1} * tokens * shape.heads);
    MlaDecodeParams& p = params;
    p.num_requests = static_cast<std::int32_t>(shape.seq_lens.size());
    p.num_tokens = tokens;
    p.num_heads = shape.heads;
    p.latent_dim = kLatent;
    p.rope_dim = kRope;
    for (const std::int32_t n : shape.query_lens) p.max_query_len = std::max(p.max_query_len, n);
    p.query_start_loc = d_starts.data();
    p.seq_lens = d_lens.data();
    p.draft_tree = shape.tree.empty() ? nullptr : d_tree.data();
    p.query_type = p.cache_type = shape.type;
    p.q_latent = d_query.data();
    p.q_pe = d_query.data() + kLatent;
    p.q_latent_token_stride = p.q_pe_token_stride = std::int64_t{shape.heads} * kRow;
    p.q_latent_head_stride = p.q_pe_head_stride = kRow;
    p.cache = d_cache.data();
    p.num_blocks = num_blocks;
    p.block_size = shape.block_size;
    p.cache_format = shape.format;
    p.cache_scale = 0.7f;
    p.cache_row_stride = shape.format == CacheFormat::dense ? row_stride / 2 : row_stride;
    p.cache_block_stride = p.cache_row_stride * shape.block_size;
    p.block_table = d_table.data();
    p.block_table_stride = table_width;
    p.out_type = shape.out_type;
    p.out = d_out.data();
    p.out_head_stride = shape.out_stride();
    p.out_token_stride = shape.out_stride() * shape.heads;
    p.lse = shape.with_lse ? d_lse.data() : nullptr;
    p.lse_head_stride = tokens;
    p.lse_token_stride = 1;
    p.sm_scale = 1.f / std::sqrt(192.f);
    p.variant.causal = shape.causal;
    p.variant.window_left = shape.window_left;
    d_sinks = DeviceArray<float>(sinks);
    p.sinks = shape.with_sinks ? d_sinks.data() : nullptr;
  }
};

/// Outputs [T, N, 512] and lse [N, T] in float64; by how much scores of a row [T, N] may be off.
struct Reference {
  std::vector<double> out, lse, score_error;
};

inline void reference_row(const Case& c, std::int32_t token, std::int32_t head, double* out,
                          double& lse, double& score_error) {
  const CaseShape& s = c.shape;
  std::size_t r = 0;
  while (r < s.seq_lens.size() && c.starts[r + 1] <= token) ++r;
  std::fill_n(out, kLatent, 0.0);
  lse = -INFINITY;
  score_error = 0;
  if (r == s.seq_lens.size()) return;
  SequenceExtent extent{c.starts[r + 1] - c.starts[r], s.seq_lens[r]};
  if (!s.tree.empty()) extent.tree = s.tree.data() + c.starts[r];
  std::vector<std::int32_t> keys;
  for (std::int32_t k = 0; k < s.seq_lens[r]; ++k) {
    if (sees(c.params.variant, token - c.starts[r], k, extent)) keys.push_back(k);
  }
  std::vector<double> q(kRow), score(s.seq_lens[r]);
  const std::size_t q_at = (std::size_t{1} * token * s.heads + head) * kRow;
  for (int d = 0; d < kRow; ++d) q[d] = decode(s.type, c.query.data(), q_at + d);
  // Queries meet integer codes in fixed point: each channel is off by 2^-16 of the largest at most,
  // where errors add up by their root. Four deviations.
  const bool fixed_point = s.format == CacheFormat::int8_per_token ||
                           s.format == CacheFormat::int4_per_token;
  double max = -INFINITY, largest = 0;
  for (const double channel : q) largest = std::max(largest, std::abs(channel));
  for (const std::int32_t k : keys) {
    double dot = 0, norm = 0;
    const std::int64_t at = c.row_at(r, k);
    for (int d = 0; d < kRow; ++d) {
      const double element = c.element(at, d);
      dot += q[d] * element;
      norm += element * element;
    }
    if (fixed_point) {
      score_error = std::max(score_error, 4 / std::sqrt(3.0) * 0x1p-16 * largest *
                                              std::sqrt(norm) * double{c.params.sm_scale});
    }
    score[k] = dot * static_cast<double>(c.params.sm_scale);
    max = std::max(max, score[k]);
  }
  if (keys.empty()) return;
  double sum = 0;
  for (const std::int32_t k : keys) {
    const double w = std::exp(score[k] - max);
    sum += w;
    const std::int64_t at = c.row_at(r, k);
    for (int d = 0; d < kLatent; ++d) out[d] += w * c.element(at, d);
  }
  const double sink = s.with_sinks ? std::exp(c.sinks[head] - max) : 0;
  for (int d = 0; d < kLatent; ++d) out[d] /= sum + sink;
  lse = max + std::log(sum);
}

inline Reference reference(const Case& c) {
  Reference ref;
  const std::int64_t rows = std::int64_t{c.tokens} * c.shape.heads;
  ref.out.resize(rows * kLatent);
  ref.lse.resize(rows);
  ref.score_error.resize(rows);
  std::vector<std::thread> threads;
  const int workers = std::max(1u, std::thread::hardware_concurrency());
  for (int w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      for (std::int64_t row = w; row < rows; row += workers) {
        const auto token = static_cast<std::int32_t>(row / c.shape.heads);
        const auto head = static_cast<std::int32_t>(row % c.shape.heads);
        reference_row(c, token, head, &ref.out[row * kLatent],
                      ref.lse[std::int64_t{head} * c.tokens + token], ref.score_error[row]);
      }
    });
  }
  for (auto& t : threads) t.join();
  return ref;
}

/// Compares what lies on the device with the reference; prints the worst element and returns false
/// when it is too far off. Also sees gaps that were written.
inline bool matches(const Case& c, const Reference& ref, const std::string& what) {
  const std::vector<std::uint8_t> out = c.d_out.get();
  const std::vector<float> lse = c.d_lse.get();
  // Rounding of the output and of the probabilities; half a unit each, with room for their sum.
  const double unit = c.shape.type == ElementType::bf16 ? 0x1p-8 : 0x1p-11;
  double worst = 0;
  std::int64_t worst_at = -1;
  int bad_lse = 0, bad_gap = 0;
  double worst_lse = 0;
  const std::int64_t rows = std::int64_t{c.tokens} * c.shape.heads;
  for (std::int64_t row = 0; row < rows; ++row) {
    double norm = 0;
    for (int d = 0; d < kLatent; ++d) {
      norm += ref.out[row * kLatent + d] * ref.out[row * kLatent + d];
    }
    const double rms = std::sqrt(norm / kLatent);
    for (int d = 0; d < kLatent; ++d) {
      const double want = ref.out[row * kLatent + d];
      const double got = decode(c.shape.out_type, out.data(), row * c.shape.out_stride() + d);
      if (std::isnan(want) && std::isnan(got)) continue;
      // A score that is off by d makes a weight off by the factor e^d.
      const double of_element = unit + ref.score_error[row];
      const double error =
          std::abs(got - want) / (of_element * (2 * std::abs(want) + 3 * rms) + 1e-12);
      if (!(error <= worst)) {
        worst = std::isnan(error) ? INFINITY : error;
        worst_at = row * kLatent + d;
      }
    }
    const std::size_t bytes = c.shape.out_type == ElementType::f32 ? 4 : 2;
    for (std::size_t i = (row * c.shape.out_stride() + kLatent) * bytes;
         i < (row + 1) * c.shape.out_stride() * bytes; ++i) {
      bad_gap += out[i] != 0xff;
    }
    const std::int64_t token = row / c.shape.heads, head = row % c.shape.heads;
    const double want = ref.lse[head * c.tokens + token];
    if (c.shape.with_lse) {
      const double got = lse[head * c.tokens + token];
      const double error = std::isnan(want)   ? (std::isnan(got) ? 0 : INFINITY)
                           : std::isinf(want) ? (got == want ? 0 : INFINITY)
                                              : std::abs(got - want) /
                                                    (1 + std::abs(want) +
                                                     1e5 * ref.score_error[row]);
      if (!(error <= 1e-5)) ++bad_lse;
      if (!(error <= worst_lse)) worst_lse = error;
    }
  }
  const bool good = worst <= 1 && bad_lse == 0 && bad_gap == 0;
  if (!good) {
    const std::int64_t row = worst_at / kLatent;
    std::printf(
        "FAIL %s: worst %.3g of tolerance at token %ld head %ld channel %ld: want %.6g got "
        "%.6g; lse wrong %d (worst %.3g), gap bytes written %d\n",
        what.c_str(), worst, row / c.shape.heads, row % c.shape.heads, worst_at % kLatent,
        worst_at < 0 ? 0.0 : ref.out[worst_at],
        worst_at < 0
            ? 0.0
            : decode(c.shape.out_type, out.data(), row * c.shape.out_stride() + worst_at % kLatent),
        bad_lse, worst_lse, bad_gap);
  }
  return good;
}

}  // namespace fovea::cuda::test
