// Raw launch interface of grouped-query decode on CUDA: plain data, shapes beside pointers, strides
// in elements.
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/cache_format.h"
#include "backends/cuda/sm90/element_type.h"
#include "backends/cuda/sm90/head_rows.h"
#include "fovea/attention_variant.h"

namespace fovea::cuda {

/// Attention of query tokens that stand at the end of their sequences, over paged keys and values,
/// as fovea::AttentionDecodeParams. All pointers are device memory.
struct DecodeParams {
  std::int32_t num_requests = 0;
  std::int32_t num_heads = 0;     ///< N
  std::int32_t num_kv_heads = 0;  ///< Hk
  std::int32_t qk_dim = 0;        ///< Dk
  std::int32_t v_dim = 0;         ///< Dv

  const std::int32_t* query_start_loc = nullptr;  ///< [num_requests + 1]
  const std::int32_t* seq_lens = nullptr;         ///< [num_requests], query tokens included.
  /// Optional [query tokens]: SequenceExtent::tree of each request at its first token's place.
  const std::uint64_t* draft_tree = nullptr;

  ElementType type = ElementType::bf16;  ///< Of q, and of blocks that are dense.
  const void* q = nullptr;               ///< [rows, N, Dk], unit innermost stride.
  std::int64_t q_row_stride = 0;
  std::int64_t q_head_stride = 0;
  CacheFormat format = CacheFormat::dense;
  float k_scale = 1.f, v_scale = 1.f;  ///< Of fp8_e4m3 and fp8_e5m2.
  HeadRows k_cache, v_cache;           ///< Strides of quantised formats count bytes.
  /// [num_requests, ...]; a request's entries are read only where a query sees their keys.
  const std::int32_t* block_table = nullptr;
  std::int64_t block_table_stride = 0;

  ElementType out_type = ElementType::bf16;
  void* out = nullptr;  ///< [rows, N, Dv], unit innermost stride.
  std::int64_t out_row_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;  ///< Optional [N, rows], natural log; -inf where nothing is visible.
  std::int64_t lse_head_stride = 0;
  std::int64_t lse_row_stride = 0;

  float sm_scale = 0.f;
  AttentionVariant variant;
  const float* sinks = nullptr;  ///< Optional [N]: raw logits in the denominator, not in lse.
};

}  // namespace fovea::cuda
