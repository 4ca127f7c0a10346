// Softmax attention of one query row and head by one block: the formula that all three attention
// ops share. Not tuned; in double, so that no logit is too large and no sum too long.
#pragma once

#include "backends/cuda/plain/block.cuh"
#include "backends/cuda/plain/elements.cuh"
#include "variants/visibility.h"

namespace fovea::cuda {

/// Where a request's rows are.
struct AttentionRequest {
  std::int32_t query_begin;  ///< Row of q.
  std::int32_t num_queries;
  std::int32_t num_keys;
  std::int32_t first_query;  ///< Positions, as in SequenceExtent.
  std::int32_t first_key;
  std::int32_t num_paged;    ///< Keys before it are in blocks, the others are rows of k and v.
  std::int32_t first_row;    ///< The row of k and v that holds key num_paged.
};

/// Operands of a call; requests, tree and table are device memory.
struct AttentionCall {
  TensorView q;     ///< [T, N, Dk], or its first channels.
  TensorView q_pe;  ///< Optional: its last ones.
  float q_scale = 1.f;
  TensorView k, k_pe, v;  ///< Rows of their own; k_pe is optional.
  CacheRows k_cache, v_cache;
  std::int64_t num_kv_heads = 1;
  TensorView out, lse, sinks;  ///< lse and sinks are optional.
  std::int64_t qk_dim = 0;
  AttentionVariant variant;
  float sm_scale = 0.f;
  const AttentionRequest* requests = nullptr;
  std::int32_t num_requests = 0;
  /// Optional [num_requests]: the keys of requests, all of them in blocks, in place of theirs.
  const std::int32_t* seq_lens = nullptr;
  const std::uint64_t* tree = nullptr;  ///< Optional, of all query rows.
  const std::int32_t* table = nullptr;  ///< [num_requests, table_width]
  std::int64_t table_width = 0;

  std::int64_t v_dim() const { return out.shape[2]; }
};

constexpr int kKeyTile = 64;

inline std::int64_t attention_shared_bytes(const AttentionCall& call) {
  return (call.qk_dim + call.v_dim()) * std::int64_t{sizeof(double)};
}

/// The request that query row `t` belongs to. One does.
__device__ inline std::int32_t request_of(const AttentionCall& call, std::int64_t t) {
  std::int32_t low = 0, high = call.num_requests - 1;
  while (low < high) {
    const std::int32_t middle = (low + high) / 2;
    const AttentionRequest& request = call.requests[middle];
    if (request.query_begin + request.num_queries <= t) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ inline AttentionRequest request_at(const AttentionCall& call, std::int32_t r) {
  AttentionRequest request = call.requests[r];
  if (call.seq_lens) {
    request.num_keys = request.num_paged = call.seq_lens[r];
    request.first_query = request.num_keys - request.num_queries;
  }
  return request;
}

/// Key `key` of a request, for one key head.
struct KeyPlace {
  const std::byte* k;  ///< Stored heads; null where they are rows.
  const std::byte* v;
  std::int64_t row;
};

__device__ inline KeyPlace place_of(const AttentionCall& call, std::int32_t r, std::int64_t kv_head,
                                    std::int64_t key) {
  const AttentionRequest request = request_at(call, r);
  if (key >= request.num_paged) {
    return {nullptr, nullptr, request.first_row + key - request.num_paged};
  }
  const std::int64_t block = call.table[r * call.table_width + key / call.k_cache.block_size];
  const std::int64_t row = key % call.k_cache.block_size;
  return {call.k_cache.row(block, row) + kv_head * call.k_cache.head.bytes,
          call.v_cache.row(block, row) + kv_head * call.v_cache.head.bytes, 0};
}

__device__ inline double load_query(const AttentionCall& call, std::int64_t t, std::int64_t n,
                                    std::int64_t d) {
  const std::int64_t first = call.q.shape[2];
  const TensorView& part = d < first ? call.q : call.q_pe;
  return load(part.data, part.dtype, at(part, t, n, d < first ? d : d - first)) * call.q_scale;
}

__device__ inline double load_key(const AttentionCall& call, const KeyPlace& place,
                                  std::int64_t kv_head, std::int64_t d) {
  if (place.k) return decode_element(call.k_cache.head, place.k, d);
  const std::int64_t own = call.k.shape[2];
  return d < own ? load(call.k.data, call.k.dtype, at(call.k, place.row, kv_head, d))
                 : load(call.k_pe.data, call.k_pe.dtype, at(call.k_pe, place.row, d - own));
}

__device__ inline double load_value(const AttentionCall& call, const KeyPlace& place,
                                    std::int64_t kv_head, std::int64_t d) {
  return place.v ? decode_element(call.v_cache.head, place.v, d)
                 : load(call.v.data, call.v.dtype, at(call.v, place.row, kv_head, d));
}

/// Of up to kKeyTile keys.
struct KeyTile {
  bool seen[kKeyTile];
  double weight[kKeyTile];  ///< First the score.
  KeyPlace place[kKeyTile];
};

/// Scores of keys [begin, end): a warp for each in turn. Hidden keys are not read.
__device__ inline void score_tile(const AttentionCall& call, const SequenceExtent& extent,
                                  std::int32_t r, std::int64_t query, std::int64_t kv_head,
                                  const KeyInterval& keys, const double* q, KeyTile& tile) {
  const int lane = threadIdx.x % 32;
  for (std::int64_t key = keys.begin + threadIdx.x / 32; key < keys.end; key += kWarps) {
    const auto j = static_cast<int>(key - keys.begin);
    const bool seen = sees(call.variant, query, key, extent);
    double score = 0;
    KeyPlace place{};
    if (seen) {
      place = place_of(call, r, kv_head, key);
      for (std::int64_t d = lane; d < call.qk_dim; d += 32) {
        score += q[d] * load_key(call, place, kv_head, d);
      }
      for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
      score *= call.sm_scale;
      const double cap = call.variant.soft_cap;
      if (cap > 0) score = cap * tanh(score / cap);
    }
    if (lane == 0) {
      tile.seen[j] = seen;
      tile.weight[j] = score;
      tile.place[j] = place;
    }
  }
}

/// Block b has query row b / N and head b % N.
__global__ void __launch_bounds__(kThreads) attention_kernel(AttentionCall call) {
  extern __shared__ double shared[];
  __shared__ KeyTile tile;
  double* const q = shared;
  double* const out = shared + call.qk_dim;
  const std::int64_t num_heads = call.out.shape[1], v_dim = call.out.shape[2];
  const std::int64_t t = blockIdx.x / num_heads;
  const std::int64_t n = blockIdx.x % num_heads;
  const std::int64_t kv_head = n / (num_heads / call.num_kv_heads);
  const std::int32_t r = request_of(call, t);
  const AttentionRequest request = request_at(call, r);
  const SequenceExtent extent{.num_queries = request.num_queries,
                              .num_keys = request.num_keys,
                              .first_query = request.first_query,
                              .first_key = request.first_key,
                              .tree = call.tree ? call.tree + request.query_begin : nullptr};
  const std::int64_t query = t - request.query_begin;
  const KeyInterval keys = visible_keys(call.variant, query, extent);

  for (std::int64_t d = threadIdx.x; d < call.qk_dim; d += kThreads) {
    q[d] = load_query(call, t, n, d);
  }
  for (std::int64_t d = threadIdx.x; d < v_dim; d += kThreads) out[d] = 0;
  double max = -INFINITY, sum = 0;
  double base = 0;  // What weights are relative to: max, but 0 while that is -inf.
  for (std::int64_t begin = keys.begin; begin < keys.end; begin += kKeyTile) {
    const KeyInterval part{begin, std::min(begin + kKeyTile, keys.end)};
    const auto count = static_cast<int>(part.size());
    __syncthreads();  // q is there, and the tile before is used up.
    score_tile(call, extent, r, query, kv_head, part, q, tile);
    __syncthreads();
    for (int j = 0; j < count; ++j) {
      if (tile.seen[j]) max = fmax(max, tile.weight[j]);
    }
    const double new_base = max == -INFINITY ? 0 : max;
    const double factor = sum == 0 ? 0 : exp(base - new_base);
    base = new_base;
    __syncthreads();  // All have the maximum.
    for (int j = threadIdx.x; j < count; j += kThreads) {
      tile.weight[j] = tile.seen[j] ? exp(tile.weight[j] - base) : 0;
    }
    __syncthreads();
    sum *= factor;
    for (int j = 0; j < count; ++j) sum += tile.weight[j];
    for (std::int64_t d = threadIdx.x; d < v_dim; d += kThreads) {
      double value = out[d] * factor;
      for (int j = 0; j < count; ++j) {
        if (tile.seen[j]) value += tile.weight[j] * load_value(call, tile.place[j], kv_head, d);
      }
      out[d] = value;
    }
  }

  const bool empty = sum == 0;  // No key, or none with any weight.
  const double sink = call.sinks.data ? load_f32(call.sinks, at(call.sinks, n)) : -INFINITY;
  const double denominator = sum + exp(sink - base);
  for (std::int64_t d = threadIdx.x; d < v_dim; d += kThreads) {
    store(call.out.data, call.out.dtype, at(call.out, t, n, d),
          empty ? 0.f : static_cast<float>(out[d] / denominator));
  }
  if (threadIdx.x == 0 && call.lse.data) {
    static_cast<float*>(call.lse.data)[at(call.lse, n, t)] =
        empty ? -INFINITY : static_cast<float>(base + log(sum));
  }
}

}  // namespace fovea::cuda
