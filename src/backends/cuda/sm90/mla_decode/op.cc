#include "backends/cuda/sm90/mla_decode/op.h"

#include <algorithm>

#include "backends/cuda/launch.h"
#include "backends/cuda/sm90/mla_decode/mla_decode.h"
#include "backends/cuda/upload.h"

namespace fovea::cuda::sm90 {
namespace {

using Operands = cuda::MlaDecodeParams;

/// What the kernel has no code for. The rest is mla_decode_sm90_declines's.
const char* why_not(const fovea::MlaDecodeParams& p) {
  if (p.q_latent.dtype == DType::f8e4m3fn) return "FP8 queries are not taken";
  if (!p.schedule->draft_tree.empty()) return "draft trees are not taken";
  if (p.variant.attention_chunk > 0) return "attention chunks are not taken";
  if (p.variant.soft_cap > 0) return "soft caps are not taken";
  if (p.q_latent.strides[2] != 1 || p.q_pe.strides[2] != 1 || p.out.strides[2] != 1) {
    return "query and output rows must have unit innermost strides";
  }
  if (p.sinks && p.sinks.strides[0] != 1) return "sinks must be contiguous";
  const KvFormat& format = p.cache->format();
  const bool taken = format.scales == KvScales::none ||
                     (format.scales == KvScales::per_tensor && format.dtype == DType::f8e4m3fn) ||
                     (format.scales == KvScales::per_token && format.dtype != DType::f8e4m3fn);
  if (!taken) return "rows of fp8_e5m2, fp8_per_token and fp8_ds_mla are not taken";
  return nullptr;
}

CacheFormat cache_format(const KvFormat& format) {
  switch (format.scales) {
    case KvScales::none:
      return CacheFormat::dense;
    case KvScales::per_tensor:
      return CacheFormat::fp8_e4m3;
    default:
      return format.dtype == DType::i8 ? CacheFormat::int8_per_token : CacheFormat::int4_per_token;
  }
}

std::int32_t longest(const DecodeSchedule& schedule) {
  std::int32_t keys = 0;
  for (const std::int32_t seq_len : schedule.seq_lens) keys = std::max(keys, seq_len);
  return keys;
}

/// Everything but the plan's arrays, which are on the host yet.
Operands operands_of(const fovea::MlaDecodeParams& p) {
  const PagedKvCache& cache = *p.cache;
  const KvFormat& format = cache.format();
  // Strides of dense rows count elements.
  const std::int64_t unit = format.scales == KvScales::none ? bytes_of(format.dtype, 1) : 1;
  Operands o;
  o.num_requests = static_cast<std::int32_t>(p.schedule->seq_lens.size());
  o.num_tokens = p.schedule->query_start_loc.back();
  o.num_heads = static_cast<std::int32_t>(p.q_latent.shape[1]);
  o.latent_dim = static_cast<std::int32_t>(p.q_latent.shape[2]);
  o.rope_dim = static_cast<std::int32_t>(p.q_pe.shape[2]);
  o.max_query_len = p.schedule->max_query_len;
  o.query_type = element_type(p.q_latent.dtype);
  o.q_latent = p.q_latent.data;
  o.q_pe = p.q_pe.data;
  o.q_latent_token_stride = p.q_latent.strides[0];
  o.q_latent_head_stride = p.q_latent.strides[1];
  o.q_pe_token_stride = p.q_pe.strides[0];
  o.q_pe_head_stride = p.q_pe.strides[1];
  o.cache_format = cache_format(format);
  o.cache_type = element_type(format.dtype);
  o.cache_scale = format.scale;
  o.cache = cache.num_blocks() > 0 ? cache.row(0, 0) : nullptr;
  o.num_blocks = cache.num_blocks();
  o.block_size = cache.block_size();
  o.cache_block_stride = cache.layout().block_stride / unit;
  o.cache_row_stride = cache.layout().row_stride / unit;
  o.out_type = element_type(p.out.dtype);
  o.out = p.out.data;
  o.out_token_stride = p.out.strides[0];
  o.out_head_stride = p.out.strides[1];
  o.lse = static_cast<float*>(p.lse.data);
  o.lse_head_stride = p.lse.strides[0];
  o.lse_token_stride = p.lse.strides[1];
  o.sm_scale = p.sm_scale;
  o.causal = p.variant.causal;
  // A window as long as every sequence hides nothing; longer ones may not fit.
  const bool hides = p.variant.window_left < longest(*p.schedule);
  o.window_left = hides ? static_cast<std::int32_t>(p.variant.window_left) : -1;
  o.sinks = static_cast<const float*>(p.sinks.data);
  return o;
}

/// What a call needs of the workspace.
struct Scratch {
  MlaDecodeGeometry geometry;
  std::int64_t table_width = 0;  ///< Blocks of a request at most.
  std::int64_t image_words = 0;  ///< query_start_loc, seq_lens, block table.
  std::int64_t kernel_bytes = 0;

  static constexpr std::int64_t kKernelAlignment = 256;
  std::int64_t bytes() const {
    return Workspace::rounded(image_words * std::int64_t{sizeof(std::int32_t)}) +
           Workspace::rounded(kernel_bytes + kKernelAlignment);
  }
};

Scratch scratch_of(const OpContext& ctx, const fovea::MlaDecodeParams& p,
                   const Operands& operands) {
  const CurrentDevice current(ctx.memory.device);
  Scratch scratch;
  check(mla_decode_sm90_geometry(operands, &scratch.geometry), "geometry of mla_decode");
  scratch.table_width =
      (longest(*p.schedule) + operands.block_size - 1) / operands.block_size;
  scratch.image_words = 1 + std::int64_t{operands.num_requests} * (2 + scratch.table_width);
  scratch.kernel_bytes =
      static_cast<std::int64_t>(mla_decode_sm90_workspace_bytes(scratch.geometry));
  return scratch;
}

void upload(const OpContext& ctx, const fovea::MlaDecodeParams& p, const Scratch& scratch,
            std::int32_t* memory, Operands& operands) {
  const DecodeSchedule& schedule = *p.schedule;
  Upload image(memory, stream_of(ctx));
  operands.query_start_loc = image.next();
  for (const std::int32_t first : schedule.query_start_loc) image.put(first);
  operands.seq_lens = image.next();
  for (const std::int32_t seq_len : schedule.seq_lens) image.put(seq_len);
  operands.block_table = image.next();
  operands.block_table_stride = scratch.table_width;
  for (std::int32_t r = 0; r < operands.num_requests; ++r) {
    const std::int32_t* blocks = p.block_table.data + r * p.block_table.stride;
    for (std::int64_t b = 0; b < scratch.table_width; ++b) {
      // What no key needs may hold anything, or not be there.
      const bool used = b * operands.block_size < schedule.seq_lens[static_cast<std::size_t>(r)] &&
                        b < p.block_table.width;
      image.put(used ? blocks[b] : 0);
    }
  }
  image.send();
}

}  // namespace

const char* mla_decode_declines(const fovea::MlaDecodeParams& p) {
  const char* reason = why_not(p);
  return reason ? reason : mla_decode_sm90_declines(operands_of(p));
}

std::int64_t mla_decode_scratch(const OpContext& ctx, const fovea::MlaDecodeParams& p) {
  return scratch_of(ctx, p, operands_of(p)).bytes();
}

void mla_decode(const OpContext& ctx, const fovea::MlaDecodeParams& p) {
  const CurrentDevice current(ctx.memory.device);
  Operands operands = operands_of(p);
  const Scratch scratch = scratch_of(ctx, p, operands);
  WorkspaceScope scope(*ctx.workspace);
  upload(ctx, p, scratch, scope.take<std::int32_t>(scratch.image_words), operands);
  const auto taken = reinterpret_cast<std::uintptr_t>(
      scope.take_bytes(scratch.kernel_bytes + Scratch::kKernelAlignment));
  constexpr std::uintptr_t kMask = Scratch::kKernelAlignment - 1;
  auto* const workspace = reinterpret_cast<void*>((taken + kMask) & ~kMask);
  check(mla_decode_sm90_plan(operands, scratch.geometry, workspace, stream_of(ctx)),
        "plan of mla_decode");
  check(mla_decode_sm90(operands, scratch.geometry, workspace, stream_of(ctx)), "mla_decode");
}

}  // namespace fovea::cuda::sm90
