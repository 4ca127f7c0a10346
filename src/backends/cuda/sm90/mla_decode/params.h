// Raw launch interface of MLA decode on CUDA: plain data, shapes beside pointers, strides in
// elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backends/cuda/sm90/cache_format.h"
#include "backends/cuda/sm90/element_type.h"
#include "fovea/attention_variant.h"

namespace fovea::cuda {

/// Absorbed MLA decode: all heads of a request attend to the same rows [latent | rope] of a paged
/// cache; the latent part is the value too. Query tokens stand at the end of their sequence. All
/// pointers are device memory.
struct MlaDecodeParams {
  std::int32_t num_requests = 0;
  std::int32_t num_tokens = 0;     ///< Rows of out and lse; those past the last request come out
                                   ///< as zeros and -inf.
  std::int32_t num_heads = 0;      ///< N
  std::int32_t latent_dim = 0;     ///< L
  std::int32_t rope_dim = 0;       ///< R
  std::int32_t max_query_len = 1;  ///< No request has more query tokens.

  const std::int32_t* query_start_loc = nullptr;  ///< [num_requests + 1]
  const std::int32_t* seq_lens = nullptr;         ///< [num_requests], query tokens included.
  /// Optional [query tokens]: SequenceExtent::tree of each request at its first token's place.
  const std::uint64_t* draft_tree = nullptr;

  ElementType query_type = ElementType::bf16;
  const void* q_latent = nullptr;  ///< [num_tokens, N, L], unit innermost stride.
  const void* q_pe = nullptr;      ///< [num_tokens, N, R], likewise.
  std::int64_t q_latent_token_stride = 0;
  std::int64_t q_latent_head_stride = 0;
  std::int64_t q_pe_token_stride = 0;
  std::int64_t q_pe_head_stride = 0;

  CacheFormat cache_format = CacheFormat::dense;
  ElementType cache_type = ElementType::bf16;  ///< Of a dense cache.
  float cache_scale = 1.f;                     ///< Of fp8_e4m3 and fp8_e5m2.
  const void* cache = nullptr;  ///< [num_blocks, block_size, L + R], unit innermost stride. Strides
                                ///< of quantised formats count bytes.
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;
  std::int64_t cache_block_stride = 0;
  std::int64_t cache_row_stride = 0;
  /// [num_requests, ...]; a request's entries are read only as far as its length needs.
  const std::int32_t* block_table = nullptr;
  std::int64_t block_table_stride = 0;

  ElementType out_type = ElementType::bf16;
  void* out = nullptr;  ///< [num_tokens, N, L], unit innermost stride.
  std::int64_t out_token_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;  ///< Optional [N, num_tokens], natural log; -inf where nothing is visible.
  std::int64_t lse_head_stride = 0;
  std::int64_t lse_token_stride = 0;

  float sm_scale = 0.f;
  AttentionVariant variant;      ///< Without attention chunks and soft cap.
  const float* sinks = nullptr;  ///< Optional [N]: raw logits in the denominator, not in lse.
};

/// How a launch covers the work. Fixed when a CUDA graph is captured; any lengths are right with
/// any of these.
struct MlaDecodeGeometry {
  std::int32_t rows = 0;                 ///< Query rows of a tile: 16, 32 or 64; quantised: 16.
  std::int32_t row_tiles_per_group = 1;  ///< 1 or 2: row tiles that walk the same keys in step.
  std::int32_t num_groups = 1;  ///< Of a block per row tile; the work is cut evenly among them.
};

}  // namespace fovea::cuda
