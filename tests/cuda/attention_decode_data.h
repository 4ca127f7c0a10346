// Inputs for grouped-query decode checks and timings, and the float64 reference.
#pragma once

#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/sm90/attention_decode/attention_decode.h"
#include "cuda/device_array.h"
#include "cuda/draft_trees.h"
#include "cuda/timing.h"
#include "variants/visibility.h"

namespace fovea::cuda::test {

struct Shape {
  std::string name;
  std::int32_t heads = 32, kv_heads = 8;
  std::int32_t dim = 128;
  std::vector<std::int32_t> query_lens, seq_lens;
  std::int64_t block_size = 64;
  AttentionVariant variant;
  bool sinks = false;
  CacheFormat format = CacheFormat::dense;
  std::vector<std::uint64_t> tree;  ///< Of all query tokens; empty: none.

  /// Of a stored head.
  std::int64_t head_bytes() const {
    switch (format) {
      case CacheFormat::dense:
        return dim * 2;
      case CacheFormat::fp8_e4m3:
      case CacheFormat::fp8_e5m2:
        return dim;
      case CacheFormat::int4_per_token:
        return dim / 2 + 8;
      default:
        return dim + 8;
    }
  }
};

constexpr bool is_fp8(CacheFormat format) {
  return format == CacheFormat::fp8_e4m3 || format == CacheFormat::fp8_e5m2 ||
         format == CacheFormat::fp8_per_token;
}

/// Heads of quantised rows: any codes (FP8 finite, of magnitudes up to 2), scales around 1/60.
__global__ void fill_heads(std::uint8_t* data, std::size_t heads, CacheFormat format,
                           int head_bytes, std::uint32_t seed) {
  for (std::size_t head = blockIdx.x; head < heads; head += gridDim.x) {
    std::uint8_t* at = data + head * head_bytes;
    const int codes = has_token_scales(format) ? head_bytes - 8 : head_bytes;
    for (int i = threadIdx.x; i < codes; i += blockDim.x) {
      std::uint64_t x = (head << 10) + i + 1 + (std::uint64_t{seed} << 50);
      x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ull;
      x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
      const auto byte = static_cast<std::uint8_t>(x >> 40);
      at[i] = is_fp8(format) ? byte & 0xbf : byte;
    }
    if (codes < head_bytes && threadIdx.x < 2) {
      const float scale = format == CacheFormat::int8_per_token ? 0.01f : 0.16f;
      reinterpret_cast<float*>(at + codes)[threadIdx.x] =
          scale * static_cast<float>(1 + (head * 7 + threadIdx.x * 3) % 5);
    }
  }
}

/// Device memory of a shape. Blocks are shuffled.
class Case {
 public:
  Case(const Shape& shape, int copies) : shape(shape) {
    const std::size_t requests = shape.query_lens.size();
    starts_.push_back(0);
    std::int64_t blocks = 0, width = 0;
    for (std::size_t r = 0; r < requests; ++r) {
      starts_.push_back(starts_.back() + shape.query_lens[r]);
      const std::int64_t used = (shape.seq_lens[r] + shape.block_size - 1) / shape.block_size;
      blocks += used;
      width = std::max(width, used);
    }
    std::vector<std::int32_t> ids(blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
    table_.assign(requests * width, 1 << 30);
    for (std::size_t r = 0, next = 0; r < requests; ++r) {
      const std::int64_t used = (shape.seq_lens[r] + shape.block_size - 1) / shape.block_size;
      for (std::int64_t b = 0; b < used; ++b) table_[r * width + b] = ids[next++];
    }
    params.num_requests = static_cast<std::int32_t>(requests);
    params.num_heads = shape.heads;
    params.num_kv_heads = shape.kv_heads;
    params.qk_dim = params.v_dim = shape.dim;
    d_starts_ = DeviceArray<std::int32_t>(starts_);
    d_lens_ = DeviceArray<std::int32_t>(shape.seq_lens);
    d_table_ = DeviceArray<std::int32_t>(table_);
    params.query_start_loc = d_starts_.data();
    params.seq_lens = d_lens_.data();
    params.block_table = d_table_.data();
    if (!shape.tree.empty()) {
      d_tree_ = DeviceArray<std::uint64_t>(shape.tree);
      params.draft_tree = d_tree_.data();
    }
    params.block_table_stride = width;
    const std::int64_t row = std::int64_t{shape.heads} * shape.dim;
    q_ = DeviceArray<std::uint16_t>(starts_.back() * row);
    fill_random<<<1320, 256>>>(q_.data(), q_.size(), 1);
    params.q = q_.data();
    params.q_row_stride = row;
    params.q_head_stride = shape.dim;
    params.format = shape.format;
    params.k_scale = 0.75f;
    params.v_scale = 1.5f;
    const bool dense = shape.format == CacheFormat::dense;
    const std::int64_t head = shape.head_bytes(), kv_row = shape.kv_heads * head;
    const std::int64_t unit = dense ? 2 : 1;  // Of strides.
    cache_bytes_ = blocks * shape.block_size * kv_row;
    for (auto [memory, rows] : {std::pair{&k_, &params.k_cache}, {&v_, &params.v_cache}}) {
      *memory = DeviceArray<std::uint8_t>(cache_bytes_ * copies);
      const std::uint32_t seed = rows == &params.k_cache ? 2 : 3;
      if (dense) {
        fill_random<<<1320, 256>>>(reinterpret_cast<std::uint16_t*>(memory->data()),
                                   memory->size() / 2, seed);
      } else {
        fill_heads<<<1320, 64>>>(memory->data(), memory->size() / head, shape.format,
                                 static_cast<int>(head), seed);
      }
      *rows = {memory->data(),  shape.dim,     shape.kv_heads, shape.block_size, blocks,
               head / unit, kv_row / unit, shape.block_size * kv_row / unit};
    }
    out_ = DeviceArray<std::uint16_t>(starts_.back() * row);
    lse_ = DeviceArray<float>(std::int64_t{starts_.back()} * shape.heads);
    params.out = out_.data();
    params.out_row_stride = row;
    params.out_head_stride = shape.dim;
    params.lse = lse_.data();
    params.lse_head_stride = starts_.back();
    params.lse_row_stride = 1;
    params.sm_scale = 1.f / std::sqrt(static_cast<float>(shape.dim));
    params.variant = shape.variant;
    if (shape.sinks) {
      for (int n = 0; n < shape.heads; ++n) sinks_.push_back(0.3f * static_cast<float>(n) - 2.f);
      d_sinks_ = DeviceArray<float>(sinks_);
      params.sinks = d_sinks_.data();
    }
    std::size_t bytes = 0;
    check_cuda(attention_decode_sm90_workspace_bytes(params, &bytes), "workspace");
    workspace_ = DeviceArray<std::uint8_t>(bytes);
    workspace_.poison();
    check_cuda(attention_decode_sm90_plan(params, workspace_.data(), nullptr), "plan");
  }

  void run(int copy, cudaStream_t stream) const {
    DecodeParams p = params;
    for (HeadRows* rows : {&p.k_cache, &p.v_cache}) {
      rows->data = static_cast<const std::uint8_t*>(rows->data) + copy * cache_bytes_;
    }
    check_cuda(attention_decode_sm90(p, workspace_.data(), stream), shape.name.c_str());
  }

  int check() const;

  Shape shape;
  DecodeParams params;

 private:
  /// Whether row `row` of head `head` is right; prints it if not.
  bool is_right(std::size_t request, std::int32_t token, std::int32_t head) const;

  std::vector<std::int32_t> starts_, table_;
  std::vector<float> sinks_;
  std::int64_t cache_bytes_ = 0;
  DeviceArray<std::int32_t> d_starts_, d_lens_, d_table_;
  DeviceArray<std::uint64_t> d_tree_;
  DeviceArray<std::uint16_t> q_, out_;
  DeviceArray<std::uint8_t> k_, v_;
  DeviceArray<float> lse_, d_sinks_;
  DeviceArray<std::uint8_t> workspace_;
  mutable std::vector<std::uint16_t> host_q_, host_out_;
  mutable std::vector<std::uint8_t> host_k_, host_v_;
  mutable std::vector<float> host_lse_;
  mutable double worst_ = 0;
};

inline double bf16(const std::vector<std::uint16_t>& data, std::int64_t at) {
  return decode(ElementType::bf16, data.data(), static_cast<std::size_t>(at));
}

/// Channel `d` of the head at `head`.
inline double stored(const Shape& shape, float scale, const std::uint8_t* head, int d) {
  if (shape.format == CacheFormat::dense) return decode(ElementType::bf16, head, d);
  float of_half = scale;
  if (is_fp8(shape.format)) {
    if (shape.format == CacheFormat::fp8_per_token) {
      std::memcpy(&of_half, head + shape.dim + (d < shape.dim / 2 ? 0 : 4), sizeof of_half);
    }
    const int bits = shape.format == CacheFormat::fp8_e5m2 ? 2 : 3;  // Of the mantissa.
    const int bias = (1 << (6 - bits)) - 1, one = 1 << bits;
    const int exponent = (head[d] & 0x7f) >> bits, mantissa = head[d] & (one - 1);
    const double value = exponent == 0 ? std::ldexp(mantissa, 1 - bias - bits)
                                       : std::ldexp(one + mantissa, exponent - bias - bits);
    return (head[d] & 0x80 ? -value : value) * static_cast<double>(of_half);
  }
  const bool is_int8 = shape.format == CacheFormat::int8_per_token;
  const int nibble = head[d / 2] >> (d % 2 * 4) & 15;
  const int code = is_int8 ? static_cast<std::int8_t>(head[d]) : (nibble ^ 8) - 8;
  std::memcpy(&of_half, head + (is_int8 ? shape.dim : shape.dim / 2) + (d < shape.dim / 2 ? 0 : 4),
              sizeof of_half);
  return code * static_cast<double>(of_half);
}

inline bool Case::is_right(std::size_t request, std::int32_t token, std::int32_t head) const {
  const std::int32_t kv_head = head / (shape.heads / shape.kv_heads);
  SequenceExtent extent{shape.query_lens[request], shape.seq_lens[request]};
  if (!shape.tree.empty()) extent.tree = shape.tree.data() + starts_[request];
  const KeyInterval keys = visible_keys(shape.variant, token, extent);
  const std::int64_t row = starts_[request] + token;
  const auto place = [&](std::int64_t key) {
    const std::int64_t block =
        table_[request * params.block_table_stride + key / shape.block_size];
    return ((block * shape.block_size + key % shape.block_size) * shape.kv_heads + kv_head) *
           shape.head_bytes();
  };
  const std::int64_t q_at = (row * shape.heads + head) * shape.dim;
  std::vector<double> weight, value(shape.dim, 0.0);
  double max = -INFINITY, sum = 0;
  for (std::int64_t key = keys.begin; key < keys.end; ++key) {
    double score = 0;
    for (int d = 0; d < shape.dim; ++d) {
      score += bf16(host_q_, q_at + d) *
               stored(shape, params.k_scale, host_k_.data() + place(key), d);
    }
    score *= params.sm_scale;
    const double cap = shape.variant.soft_cap;
    if (cap > 0) score = cap * std::tanh(score / cap);
    if (!sees(shape.variant, token, key, extent)) score = -INFINITY;
    weight.push_back(score);
    max = std::max(max, score);
  }
  for (double& w : weight) sum += w = std::exp(w - max);
  const double denominator = sum + (sinks_.empty() ? 0 : std::exp(sinks_[head] - max));
  for (std::int64_t key = keys.begin; key < keys.end; ++key) {
    const double w = weight[key - keys.begin] / denominator;
    for (int d = 0; d < shape.dim; ++d) {
      value[d] += w * stored(shape, params.v_scale, host_v_.data() + place(key), d);
    }
  }
  double error = 0, norm = 1e-6;
  for (int d = 0; d < shape.dim; ++d) {
    const double got = bf16(host_out_, q_at + d);
    error = std::max(error, std::isnan(got) ? INFINITY : std::abs(got - value[d]));
    norm = std::max(norm, std::abs(value[d]));
  }
  const double want_lse = sum > 0 ? max + std::log(sum) : -INFINITY;
  const double got_lse = host_lse_[head * params.lse_head_stride + row];
  const bool lse_right = want_lse == got_lse || std::abs(want_lse - got_lse) < 3e-4;
  worst_ = std::max(worst_, error / norm);
  if (error <= 0.012 * norm && lse_right) return true;
  std::printf("FAIL %s: request %zu token %d head %d: error %g of %g, lse %g expected %g\n",
              shape.name.c_str(), request, token, head, error, norm, got_lse, want_lse);
  return false;
}

inline int Case::check() const {
  out_.poison();
  lse_.poison();
  host_q_ = q_.get();
  host_k_ = k_.get();
  host_v_ = v_.get();
  for (int round = 0; round < 2; ++round) {  // The counters must come back to 0.
    run(0, nullptr);
    check_cuda(cudaDeviceSynchronize(), shape.name.c_str());
  }
  host_out_ = out_.get();
  host_lse_ = lse_.get();
  for (std::size_t r = 0; r < shape.query_lens.size(); ++r) {
    for (std::int32_t token = 0; token < shape.query_lens[r]; ++token) {
      const std::int32_t step = shape.seq_lens[r] > 500 ? 3 : 1;
      for (std::int32_t head = 0; head < shape.heads; head += step) {
        if (!is_right(r, token, head)) return 1;
      }
    }
  }
  std::printf("ok %s (%.4f)\n", shape.name.c_str(), worst_);
  std::fflush(stdout);
  return 0;
}

}  // namespace fovea::cuda::test
