// Raw launch interface of attention prefill on CUDA: plain data, shapes beside pointers, strides in
// elements.
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/element_type.h"
#include "backends/cuda/sm90/head_rows.h"
#include "fovea/attention_variant.h"

namespace fovea::cuda {

/// Up to 128 query rows of one request, and which keys belong to it. 32 bytes, read as two words.
struct alignas(16) QueryTile {
  std::int32_t query_row;  ///< Row of q and out of the tile's first query.
  std::int32_t num_rows;
  std::int32_t position;   ///< Of the tile's first query in its sequence; may be negative.
  std::int32_t num_keys;   ///< Of the request.
  std::int32_t first_key;  ///< Position of key 0.
  std::int32_t num_paged;  ///< Keys before it are in blocks, the others are rows of k and v.
  std::int32_t first_row;  ///< The row of k and v that holds key num_paged.
  std::int32_t request;    ///< Row of the block table.
};

/// Attention of ragged query rows, as fovea::AttentionPrefillParams. All pointers are device
/// memory.
struct PrefillParams {
  ElementType type = ElementType::bf16;  ///< Of q, k, v and blocks.
  std::int32_t num_heads = 0;            ///< N
  std::int32_t num_kv_heads = 0;         ///< Hk
  std::int32_t qk_dim = 0;               ///< Dk
  std::int32_t pe_dim = 0;               ///< R: the last channels of keys that k_pe holds.
  std::int32_t v_dim = 0;                ///< Dv
  HeadRows q, k, k_pe, v;
  HeadRows k_cache, v_cache;  ///< Absent, or the keys before each request's num_paged.
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

  const QueryTile* tiles = nullptr;  ///< [num_tiles], those with most keys first.
  std::int32_t num_tiles = 0;
  std::int32_t heads_at_once = 1;    ///< Divides N: heads whose tiles are taken in turn.
  std::uint32_t* counter = nullptr;  ///< 0 before a launch and after it.
};

}  // namespace fovea::cuda
