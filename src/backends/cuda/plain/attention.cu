// The attention ops: each describes its operands for the one kernel.
#include "backends/cuda/plain/attention.cuh"

#include "backends/cuda/index_checks.h"
#include "backends/cuda/plain/kernels.h"
#include "backends/cuda/upload.h"
#include "plan/extents.h"

namespace fovea::cuda::plain {
namespace {

constexpr std::int64_t kWordsPerRequest = sizeof(AttentionRequest) / sizeof(std::int32_t);

constexpr std::int64_t kCheckedWords = 2;  ///< A request's, of check_lengths().

/// Sizes of what a call uploads.
struct ImageShape {
  std::int64_t requests = 0;
  std::int64_t tree = 0;         ///< Query rows in draft trees.
  std::int64_t table_width = 0;  ///< Blocks of a request at most.

  std::int64_t words() const { return 2 * tree + requests * (kWordsPerRequest + table_width); }
  std::int64_t bytes() const {
    return Workspace::rounded(words() * std::int64_t{sizeof(std::int32_t)});
  }
};

std::int64_t blocks_of(std::int64_t keys, const PagedKvCache& cache) {
  return (keys + cache.block_size() - 1) / cache.block_size();
}

ImageShape image_of(const DecodeSchedule& schedule, const PagedKvCache& cache) {
  std::int64_t keys = 0;
  for (const std::int32_t seq_len : schedule.seq_lens) keys = std::max<std::int64_t>(keys, seq_len);
  // A table that is on the device is read there; in its place are what check_lengths() writes.
  return {.requests = std::ssize(schedule.seq_lens),
          .tree = std::ssize(schedule.draft_tree),
          .table_width = schedule.device_seq_lens ? kCheckedWords : blocks_of(keys, cache)};
}

ImageShape image_of(const AttentionPrefillParams& p) {
  const PagedKvCache* cache = p.paged.k_cache;
  return {.requests = std::ssize(p.schedule->cu_seqlens_q) - 1,
          .table_width = cache ? blocks_of(p.schedule->max_seq_len, *cache) : 0};
}

/// Sends the draft tree, requests and block table of a call; request_of(r) describes a request.
template <class RequestOf>
void upload(const OpContext& ctx, const ImageShape& shape, std::span<const std::uint64_t> tree,
            RequestOf request_of, const BlockTableView& blocks, std::int64_t block_size,
            std::int32_t* memory) {
  Upload image(memory, stream_of(ctx));
  for (const std::uint64_t entry : tree) image.put(entry);
  for (std::int32_t r = 0; r < shape.requests; ++r) {
    const AttentionRequest q = request_of(r);
    for (const std::int32_t word : {q.query_begin, q.num_queries, q.num_keys, q.first_query,
                                    q.first_key, q.num_paged, q.first_row}) {
      image.put(word);
    }
  }
  for (std::int32_t r = 0; r < shape.requests && shape.table_width > 0; ++r) {
    // Entries past a request's keys are not read, here nor there.
    const std::int64_t used = (request_of(r).num_paged + block_size - 1) / block_size;
    for (std::int64_t b = 0; b < shape.table_width; ++b) {
      image.put(b < used && b < blocks.width ? blocks.data[r * blocks.stride + b] : 0);
    }
  }
  image.send();
}

/// Where upload() has put them.
void find(const ImageShape& shape, const std::int32_t* memory, AttentionCall& call) {
  const std::int32_t* requests = memory + 2 * shape.tree;
  if (shape.tree > 0) call.tree = reinterpret_cast<const std::uint64_t*>(memory);
  call.requests = reinterpret_cast<const AttentionRequest*>(requests);
  call.num_requests = static_cast<std::int32_t>(shape.requests);
  call.table = requests + shape.requests * kWordsPerRequest;
  call.table_width = shape.table_width;
}

/// Of any op: tokens is the number of query rows that belong to requests.
void run(const OpContext& ctx, const AttentionCall& call, std::int64_t tokens) {
  launch(ctx,
         LaunchShape{.blocks = tokens * call.out.shape[1],
                     .shared_bytes = attention_shared_bytes(call)},
         attention_kernel, call);
}

const char* declines(std::int64_t qk_dim, std::int64_t v_dim) {
  // Beside the tile, in the 48 KiB of shared memory that every GPU gives without asking.
  return qk_dim + v_dim > 5600 ? "keys and values together have more than 5600 channels" : nullptr;
}

/// Of the decode ops: all keys are in blocks.
void upload_decode(const OpContext& ctx, const DecodeSchedule& schedule,
                   const BlockTableView& blocks, const PagedKvCache& cache,
                   const AttentionVariant& variant, std::byte* scratch) {
  const auto request_of = [&](std::int32_t r) {
    const SequenceExtent extent = extent_of(schedule, r);
    return AttentionRequest{
        .query_begin = schedule.query_start_loc[static_cast<std::size_t>(r)],
        .num_queries = static_cast<std::int32_t>(extent.num_queries),
        .num_keys = static_cast<std::int32_t>(extent.num_keys),
        .first_query = static_cast<std::int32_t>(extent.first_query),
        .first_key = 0,
        .num_paged = static_cast<std::int32_t>(extent.num_queries > 0 ? extent.num_keys : 0),
        .first_row = 0};
  };
  ImageShape shape = image_of(schedule, cache);
  auto* const image = reinterpret_cast<std::int32_t*>(scratch);
  if (schedule.device_seq_lens) {
    if (ctx.device_fault) {
      check_lengths(ctx, schedule, blocks, cache, variant,
                    image + shape.words() - kCheckedWords * shape.requests);
    }
    shape.table_width = 0;
  }
  upload(ctx, shape, schedule.draft_tree, request_of, blocks, cache.block_size(), image);
}

void run_decode(const OpContext& ctx, const DecodeSchedule& schedule, const BlockTableView& blocks,
                const PagedKvCache& cache, const TensorView& prepared, AttentionCall call) {
  const ImageShape shape = image_of(schedule, cache);
  WorkspaceScope scope(*ctx.workspace);
  auto* scratch = static_cast<std::byte*>(prepared.data);
  if (scratch == nullptr) {
    scratch = scope.take_bytes(shape.bytes());
    upload_decode(ctx, schedule, blocks, cache, call.variant, scratch);
  }
  find(shape, reinterpret_cast<const std::int32_t*>(scratch), call);
  if (schedule.device_seq_lens) {
    call.seq_lens = ctx.device_fault ? call.table : schedule.device_seq_lens;
    call.table = blocks.data;
    call.table_width = blocks.stride;
  }
  run(ctx, call, schedule.query_start_loc.back());
}

}  // namespace

const char* attention_decode_declines(const AttentionDecodeParams& p) {
  return declines(p.q.shape[2], p.out.shape[2]);
}

std::int64_t attention_decode_scratch(const OpContext&, const AttentionDecodeParams& p) {
  return image_of(*p.schedule, *p.kv.k_cache).bytes();
}

void attention_decode_prepare(const OpContext& ctx, const AttentionDecodeParams& p,
                              std::byte* scratch) {
  upload_decode(ctx, *p.schedule, p.kv.block_table, *p.kv.k_cache, p.variant, scratch);
}

void attention_decode(const OpContext& ctx, const AttentionDecodeParams& p) {
  run_decode(ctx, *p.schedule, p.kv.block_table, *p.kv.k_cache, p.prepared,
             {.q = p.q,
              .k_cache = CacheRows(*p.kv.k_cache, p.kv.num_kv_heads),
              .v_cache = CacheRows(*p.kv.v_cache, p.kv.num_kv_heads),
              .num_kv_heads = p.kv.num_kv_heads,
              .out = p.out,
              .lse = p.lse,
              .sinks = p.sinks,
              .qk_dim = p.q.shape[2],
              .variant = p.variant,
              .sm_scale = p.sm_scale});
}

const char* mla_decode_declines(const MlaDecodeParams& p) {
  return declines(p.q_latent.shape[2] + p.q_pe.shape[2], p.out.shape[2]);
}

std::int64_t mla_decode_scratch(const OpContext&, const MlaDecodeParams& p) {
  return image_of(*p.schedule, *p.cache).bytes();
}

void mla_decode_prepare(const OpContext& ctx, const MlaDecodeParams& p, std::byte* scratch) {
  upload_decode(ctx, *p.schedule, p.block_table, *p.cache, p.variant, scratch);
}

void mla_decode(const OpContext& ctx, const MlaDecodeParams& p) {
  run_decode(ctx, *p.schedule, p.block_table, *p.cache, p.prepared,
             {.q = p.q_latent,
              .q_pe = p.q_pe,
              .q_scale = p.q_latent.dtype == DType::f8e4m3fn ? p.q_scale : 1.f,
              .k_cache = CacheRows(*p.cache, 1),
              .v_cache = CacheRows(*p.cache, 1),
              .out = p.out,
              .lse = p.lse,
              .sinks = p.sinks,
              .qk_dim = p.q_latent.shape[2] + p.q_pe.shape[2],
              .variant = p.variant,
              .sm_scale = p.sm_scale});
}

const char* attention_prefill_declines(const AttentionPrefillParams& p) {
  return declines(p.q.shape[2], p.out.shape[2]);
}

std::int64_t attention_prefill_scratch(const OpContext&, const AttentionPrefillParams& p) {
  return image_of(p).bytes();
}

void attention_prefill(const OpContext& ctx, const AttentionPrefillParams& p) {
  const PrefillSchedule& schedule = *p.schedule;
  const bool is_paged = p.paged.k_cache != nullptr;
  const bool has_rows = p.k.data != nullptr;
  AttentionCall call{.q = p.q,
                     .k = p.k,
                     .k_pe = p.k_pe,
                     .v = p.v,
                     .num_kv_heads = is_paged ? p.paged.num_kv_heads : p.k.shape[1],
                     .out = p.out,
                     .lse = p.lse,
                     .sinks = p.sinks,
                     .qk_dim = p.q.shape[2],
                     .variant = p.variant,
                     .sm_scale = p.sm_scale};
  if (is_paged) {
    call.k_cache = CacheRows(*p.paged.k_cache, p.paged.num_kv_heads);
    call.v_cache = CacheRows(*p.paged.v_cache, p.paged.num_kv_heads);
  }
  const auto request_of = [&](std::int32_t r) {
    const auto i = static_cast<std::size_t>(r);
    const SequenceExtent extent = extent_of(schedule, r);
    const std::int64_t paged = !is_paged || extent.num_queries == 0 ? 0
                               : has_rows ? extent.num_keys - extent.num_queries
                                          : extent.num_keys;
    return AttentionRequest{
        .query_begin = schedule.cu_seqlens_q[i],
        .num_queries = static_cast<std::int32_t>(extent.num_queries),
        .num_keys = static_cast<std::int32_t>(extent.num_keys),
        .first_query = static_cast<std::int32_t>(extent.first_query),
        .first_key = static_cast<std::int32_t>(extent.first_key),
        .num_paged = static_cast<std::int32_t>(paged),
        .first_row = is_paged ? schedule.cu_seqlens_q[i] : schedule.cu_seqlens_k[i]};
  };
  const ImageShape shape = image_of(p);
  WorkspaceScope scope(*ctx.workspace);
  auto* const scratch = scope.take<std::int32_t>(shape.words());
  upload(ctx, shape, {}, request_of, p.paged.block_table,
         is_paged ? p.paged.k_cache->block_size() : 1, scratch);
  find(shape, scratch, call);
  run(ctx, call, schedule.cu_seqlens_q.back());
}

}  // namespace fovea::cuda::plain
