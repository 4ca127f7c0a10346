#include "fovea/fovea.h"

#include <limits>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "core/check.h"
#include "fovea/ops.h"
#include "fovea/runtime.h"

struct fovea_runtime {
  fovea::Runtime runtime;
};
struct fovea_cache {
  fovea::PagedKvCache cache;
};
struct fovea_plan {
  fovea::BatchPlan plan;
};

namespace fovea {
namespace {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

fovea_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return FOVEA_INVALID_ARGUMENT;
    case ErrorCode::unsupported:
      return FOVEA_UNSUPPORTED;
    case ErrorCode::corrupt_file:
      return FOVEA_CORRUPT_FILE;
    case ErrorCode::resource_exhausted:
      return FOVEA_RESOURCE_EXHAUSTED;
    case ErrorCode::device_failed:
      return FOVEA_DEVICE_FAILED;
  }
  return FOVEA_INTERNAL;
}

template <class F>
fovea_status guarded(F&& call) noexcept {
  try {
    call();
    return FOVEA_OK;
  } catch (const Error& error) {
    last_error() = error.what();
    return status_of(error.code());
  } catch (const std::bad_alloc&) {
    last_error() = "memory ran out";
    return FOVEA_RESOURCE_EXHAUSTED;
  } catch (const std::exception& error) {
    last_error() = error.what();
    return FOVEA_INTERNAL;
  }
}

template <class T>
const T& required(const T* pointer, const char* name) {
  FOVEA_CHECK(pointer != nullptr, invalid_argument, "{} is NULL", name);
  return *pointer;
}

DType dtype_of_c(fovea_dtype dtype, const char* name) {
  switch (dtype) {
    case FOVEA_F32:
      return DType::f32;
    case FOVEA_F16:
      return DType::f16;
    case FOVEA_BF16:
      return DType::bf16;
    case FOVEA_F8E4M3FN:
      return DType::f8e4m3fn;
    case FOVEA_U8:
      return DType::u8;
    case FOVEA_I32:
      return DType::i32;
    case FOVEA_I64:
      return DType::i64;
  }
  fail(ErrorCode::invalid_argument, "{}.dtype is {}, which is no fovea_dtype", name, dtype);
}

Device device_of(const fovea_device& device, const char* name) {
  FOVEA_CHECK(device.type == FOVEA_CPU || device.type == FOVEA_CUDA, invalid_argument,
              "{}.device.type is {}; it must be FOVEA_CPU ({}) or FOVEA_CUDA ({})", name,
              device.type, static_cast<int>(FOVEA_CPU), static_cast<int>(FOVEA_CUDA));
  if (device.type == FOVEA_CPU) return {};
  return {Device::Type::cuda, device.index};
}

TensorView view_of(const fovea_tensor& tensor, const char* name) {
  TensorView view;
  if (!tensor.data) return view;
  FOVEA_CHECK(tensor.ndim >= 0 && tensor.ndim <= kMaxRank, invalid_argument,
              "{}.ndim is {}; it must be in [0, {}]", name, tensor.ndim, kMaxRank);
  view.data = tensor.data;
  view.device = device_of(tensor.device, name);
  view.dtype = dtype_of_c(tensor.dtype, name);
  view.ndim = tensor.ndim;
  for (std::size_t d = 0; d < static_cast<std::size_t>(tensor.ndim); ++d) {
    FOVEA_CHECK(tensor.shape[d] >= 0, invalid_argument, "{}.shape[{}] is {}", name, d,
                tensor.shape[d]);
    view.shape[d] = tensor.shape[d];
    view.strides[d] = tensor.strides[d];
  }
  return view;
}

std::span<const std::int32_t> lengths_span(const std::int32_t* data, std::int64_t count,
                                           const char* name) {
  FOVEA_CHECK(count >= 0 && count <= std::numeric_limits<std::int32_t>::max(), invalid_argument,
              "{} has {} elements; it must have between 0 and 2^31 - 1", name, count);
  FOVEA_CHECK(data != nullptr || count == 0, invalid_argument, "{} is NULL", name);
  return {data, static_cast<std::size_t>(count)};
}

std::span<const std::int32_t> seq_lens_of(const fovea_lengths& lengths) {
  return lengths_span(lengths.seq_lens, lengths.requests, "seq_lens");
}

std::span<const std::int32_t> query_start_loc_of(const fovea_lengths& lengths) {
  const std::span<const std::int32_t> seq_lens = seq_lens_of(lengths);  // Checks `requests`.
  return lengths_span(lengths.query_start_loc, static_cast<std::int64_t>(seq_lens.size()) + 1,
                      "query_start_loc");
}

/// From 0.
std::vector<std::int32_t> cumulative(std::span<const std::int32_t> seq_lens) {
  std::vector<std::int32_t> sums = {0};
  std::int64_t sum = 0;
  for (const std::int32_t length : seq_lens) {
    sum += length;
    FOVEA_CHECK(length >= 0 && sum <= std::numeric_limits<std::int32_t>::max(), invalid_argument,
                "seq_lens: entry {} is {} and the sum so far {}; it must not be negative, nor the "
                "sum exceed 32 bits",
                sums.size() - 1, length, sum);
    sums.push_back(static_cast<std::int32_t>(sum));
  }
  return sums;
}

AttentionVariant variant_of(const fovea_variant& variant) {
  return {variant.causal != 0, variant.window_left, variant.attention_chunk, variant.soft_cap};
}

AttentionVariant variant_of(const fovea_step& step) {
  return step.plan ? step.plan->plan.variant : variant_of(step.variant);
}

BlockTableView table_of(const fovea_block_table& table) {
  return {table.data, table.requests, table.width, table.stride};
}

const PagedKvCache* cache_of(const fovea_cache* cache) { return cache ? &cache->cache : nullptr; }

PagedKv paged_of(const fovea_cache* k_cache, const fovea_cache* v_cache,
                 const fovea_block_table& table) {
  PagedKv paged;
  paged.k_cache = cache_of(k_cache);
  paged.v_cache = cache_of(v_cache);
  paged.block_table = table_of(table);
  paged.num_kv_heads = k_cache ? k_cache->cache.format().num_heads : 0;
  return paged;
}

/// With a plan: scratch from the runtime's workspace, which grows where it must.
template <class Params>
void run_planned(const OpContext& ctx, const Params& params,
                 void (*op)(const OpContext&, const Params&)) {
  ctx.workspace->reserve(workspace_bytes(ctx, params));
  op(ctx, params);
}

PagedKvCache make_cache(const KvFormat& format, const fovea_cache_layout& layout) {
  const KvCacheLayout where{layout.num_blocks, layout.block_size, layout.row_stride,
                            layout.block_stride, layout.storage_offset};
  const Device device = device_of(layout.device, "layout");
  if (layout.base) return PagedKvCache::view(layout.base, format, where, device);
  FOVEA_CHECK(device == Device{}, unsupported,
              "layout.base is NULL and layout.device is a GPU; a cache there needs memory of the "
              "caller's");
  return PagedKvCache::allocate(format, where);
}

}  // namespace
}  // namespace fovea

using namespace fovea;  // NOLINT(google-build-using-namespace): the functions below are C's.

const char* fovea_last_error(void) { return last_error().c_str(); }

fovea_status fovea_runtime_create(const fovea_runtime_options* options, fovea_runtime** runtime) {
  return guarded([&] {
    required(runtime, "runtime");
    const fovea_runtime_options given = options ? *options : fovea_runtime_options{};
    *runtime = new fovea_runtime{Runtime({.backend = given.backend ? given.backend : "auto",
                                          .isa = given.isa ? given.isa : "auto",
                                          .num_threads = given.num_threads,
                                          .batch_invariant = given.batch_invariant != 0,
                                          .cuda_device = given.cuda_device,
                                          .cuda_stream = given.cuda_stream})};
  });
}

void fovea_runtime_destroy(fovea_runtime* runtime) { delete runtime; }

fovea_status fovea_latent_cache_create(const char* format, int64_t kv_lora_rank,
                                       int64_t qk_rope_head_dim, float scale,
                                       const fovea_cache_layout* layout, fovea_cache** cache) {
  return guarded([&] {
    required(cache, "cache");
    const KvFormat rows = latent_format(&required(format, "format"), kv_lora_rank,
                                        qk_rope_head_dim, {scale, scale});
    *cache = new fovea_cache{make_cache(rows, required(layout, "layout"))};
  });
}

fovea_status fovea_heads_cache_create(const char* format, int64_t num_heads, int64_t head_dim,
                                      float scale, const fovea_cache_layout* layout,
                                      fovea_cache** cache) {
  return guarded([&] {
    required(cache, "cache");
    const KvFormat rows = heads_format(&required(format, "format"), num_heads, head_dim, scale);
    *cache = new fovea_cache{make_cache(rows, required(layout, "layout"))};
  });
}

void fovea_cache_destroy(fovea_cache* cache) { delete cache; }

fovea_status fovea_plan_create(const fovea_runtime* runtime, const fovea_lengths* lengths,
                               const fovea_variant* variant, int32_t decode_threshold,
                               fovea_plan** plan) {
  return guarded([&] {
    required(plan, "plan");
    const auto query_start_loc = query_start_loc_of(required(lengths, "lengths"));
    const auto seq_lens = seq_lens_of(*lengths);
    SequenceBatch batch;
    batch.query_start_loc.assign(query_start_loc.begin(), query_start_loc.end());
    batch.seq_lens.assign(seq_lens.begin(), seq_lens.end());
    PlanOptions options;
    options.split.reorder_batch_threshold = decode_threshold;
    if (decode_threshold > 1) options.split.support = QueryLenSupport::varlen;
    options.variant = variant_of(required(variant, "variant"));
    options.context_plan = ContextPlanKind::paged;
    const PlanTarget& target = required(runtime, "runtime").runtime.context().plan_target;
    *plan = new fovea_plan{make_plan(batch, target, options)};
  });
}

void fovea_plan_destroy(fovea_plan* plan) { delete plan; }

fovea_status fovea_mla_decode(const fovea_runtime* runtime,
                              const fovea_mla_decode_params* params) {
  return guarded([&] {
    const OpContext& ctx = required(runtime, "runtime").runtime.context();
    const fovea_mla_decode_params& p = required(params, "params");
    MlaDecodeParams op;
    op.q_latent = view_of(p.q_latent, "q_latent");
    op.q_pe = view_of(p.q_pe, "q_pe");
    op.cache = cache_of(p.cache);
    op.block_table = table_of(p.block_table);
    op.out = view_of(p.out, "out");
    op.lse = view_of(p.lse, "lse");
    op.variant = variant_of(p.step);
    op.sm_scale = p.sm_scale;
    op.sinks = view_of(p.sinks, "sinks");
    op.q_scale = p.q_scale;
    if (p.step.plan) {
      op.schedule = &p.step.plan->plan.decode;
      run_planned(ctx, op, &mla_decode);
    } else {
      mla_decode_once(ctx, op, query_start_loc_of(p.step.lengths), seq_lens_of(p.step.lengths));
    }
  });
}

fovea_status fovea_attention_decode(const fovea_runtime* runtime,
                                    const fovea_attention_decode_params* params) {
  return guarded([&] {
    const OpContext& ctx = required(runtime, "runtime").runtime.context();
    const fovea_attention_decode_params& p = required(params, "params");
    AttentionDecodeParams op;
    op.q = view_of(p.q, "q");
    op.kv = paged_of(p.k_cache, p.v_cache, p.block_table);
    op.out = view_of(p.out, "out");
    op.lse = view_of(p.lse, "lse");
    op.variant = variant_of(p.step);
    op.sm_scale = p.sm_scale;
    op.sinks = view_of(p.sinks, "sinks");
    if (p.step.plan) {
      op.schedule = &p.step.plan->plan.decode;
      run_planned(ctx, op, &attention_decode);
    } else {
      attention_decode_once(ctx, op, query_start_loc_of(p.step.lengths),
                            seq_lens_of(p.step.lengths));
    }
  });
}

fovea_status fovea_attention_prefill(const fovea_runtime* runtime,
                                     const fovea_attention_prefill_params* params) {
  return guarded([&] {
    const OpContext& ctx = required(runtime, "runtime").runtime.context();
    const fovea_attention_prefill_params& p = required(params, "params");
    AttentionPrefillParams op;
    op.q = view_of(p.q, "q");
    op.k = view_of(p.k, "k");
    op.k_pe = view_of(p.k_pe, "k_pe");
    op.v = view_of(p.v, "v");
    if (p.k_cache || p.v_cache) op.paged = paged_of(p.k_cache, p.v_cache, p.block_table);
    op.out = view_of(p.out, "out");
    op.lse = view_of(p.lse, "lse");
    op.variant = variant_of(p.step);
    op.sm_scale = p.sm_scale;
    op.sinks = view_of(p.sinks, "sinks");
    if (p.step.plan) {
      op.schedule = &p.step.plan->plan.prefill;
      run_planned(ctx, op, &attention_prefill);
      return;
    }
    attention_prefill_once(ctx, op, query_start_loc_of(p.step.lengths),
                           cumulative(seq_lens_of(p.step.lengths)));
  });
}

fovea_status fovea_merge_state(const fovea_runtime* runtime,
                               const fovea_merge_state_params* params) {
  return guarded([&] {
    const OpContext& ctx = required(runtime, "runtime").runtime.context();
    const fovea_merge_state_params& p = required(params, "params");
    MergeStateParams op;
    op.prefix = {view_of(p.prefix_out, "prefix_out"), view_of(p.prefix_lse, "prefix_lse")};
    op.suffix = {view_of(p.suffix_out, "suffix_out"), view_of(p.suffix_lse, "suffix_lse")};
    op.result = {view_of(p.out, "out"), view_of(p.lse, "lse")};
    op.sinks = view_of(p.sinks, "sinks");
    merge_state(ctx, op);
  });
}

fovea_status fovea_kv_append(const fovea_runtime* runtime, const fovea_tensor* kv_c,
                             const fovea_tensor* k_pe, const fovea_tensor* slot_mapping,
                             const fovea_cache* cache) {
  return guarded([&] {
    KvAppendParams op;
    op.kv_c = view_of(required(kv_c, "kv_c"), "kv_c");
    op.k_pe = view_of(required(k_pe, "k_pe"), "k_pe");
    op.slot_mapping = view_of(required(slot_mapping, "slot_mapping"), "slot_mapping");
    op.cache = cache_of(cache);
    kv_append(required(runtime, "runtime").runtime, op);
  });
}

fovea_status fovea_gqa_append(const fovea_runtime* runtime, const fovea_tensor* k,
                              const fovea_tensor* v, const fovea_tensor* slot_mapping,
                              const fovea_cache* k_cache, const fovea_cache* v_cache) {
  return guarded([&] {
    GqaAppendParams op;
    op.k = view_of(required(k, "k"), "k");
    op.v = view_of(required(v, "v"), "v");
    op.slot_mapping = view_of(required(slot_mapping, "slot_mapping"), "slot_mapping");
    op.k_cache = cache_of(k_cache);
    op.v_cache = cache_of(v_cache);
    gqa_append(required(runtime, "runtime").runtime, op);
  });
}

fovea_status fovea_kv_gather(const fovea_runtime* runtime, const fovea_cache* cache,
                             const fovea_block_table* block_table, const int32_t* starts,
                             const int32_t* seq_lens, const fovea_tensor* out) {
  return guarded([&] {
    KvGatherParams op;
    op.cache = cache_of(cache);
    op.block_table = table_of(required(block_table, "block_table"));
    op.starts = lengths_span(starts, block_table->requests, "starts");
    op.seq_lens = lengths_span(seq_lens, block_table->requests, "seq_lens");
    op.out = view_of(required(out, "out"), "out");
    kv_gather(required(runtime, "runtime").runtime, op);
  });
}
