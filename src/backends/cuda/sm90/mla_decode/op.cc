#include "backends/cuda/sm90/mla_decode/op.h"

#include <algorithm>

#include "backends/cuda/launch.h"
#include "backends/cuda/sm90/decode_image.h"
#include "backends/cuda/sm90/mla_decode/mla_decode.h"

namespace fovea::cuda::sm90 {
namespace {

using Operands = cuda::MlaDecodeParams;

/// What the kernel has no code for. The rest is mla_decode_sm90_declines's.
const char* why_not(const fovea::MlaDecodeParams& p) {
  if (p.q_latent.dtype == DType::f8e4m3fn) return "FP8 queries are not taken";
  if (p.variant.attention_chunk > 0) return "attention chunks are not taken";
  if (p.variant.soft_cap > 0) return "soft caps are not taken";
  if (p.q_latent.strides[2] != 1 || p.q_pe.strides[2] != 1 || p.out.strides[2] != 1) {
    return "query and output rows must have unit innermost strides";
  }
  if (p.sinks && p.sinks.strides[0] != 1) return "sinks must be contiguous";
  return nullptr;
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
  o.variant = p.variant;
  // A window as long as every sequence hides nothing; longer ones may not fit.
  if (o.variant.window_left >= DecodeImage(*p.schedule, cache).longest()) {
    o.variant.window_left = -1;
  }
  o.sinks = static_cast<const float*>(p.sinks.data);
  return o;
}

/// What a call needs of the workspace beside the plan's arrays.
struct Scratch {
  MlaDecodeGeometry geometry;
  std::int64_t kernel_bytes = 0;

  Scratch(const OpContext& ctx, const Operands& operands) {
    const CurrentDevice current(ctx.memory.device);
    check(mla_decode_sm90_geometry(operands, &geometry), "geometry of mla_decode");
    kernel_bytes = static_cast<std::int64_t>(mla_decode_sm90_workspace_bytes(geometry));
  }
};

}  // namespace

const char* mla_decode_declines(const fovea::MlaDecodeParams& p) {
  const char* reason = why_not(p);
  return reason ? reason : mla_decode_sm90_declines(operands_of(p));
}

/// Enough for rows of any format, which layers do not know when they size their workspace.
std::int64_t mla_decode_scratch(const OpContext& ctx, const fovea::MlaDecodeParams& p) {
  Operands operands = operands_of(p);
  std::int64_t bytes = 0;
  for (const CacheFormat format : {CacheFormat::dense, CacheFormat::int8_per_token}) {
    operands.cache_format = format;
    bytes = std::max(bytes, Scratch(ctx, operands).kernel_bytes);
  }
  return DecodeImage(*p.schedule, *p.cache).bytes(bytes);
}

void mla_decode_prepare(const OpContext& ctx, const fovea::MlaDecodeParams& p, std::byte* memory) {
  const CurrentDevice current(ctx.memory.device);
  Operands operands = operands_of(p);
  const DecodeImage image(*p.schedule, *p.cache);
  image.send(ctx, p.block_table, p.variant, memory);
  image.find(ctx, p.block_table, memory, operands);
  check(mla_decode_sm90_plan(operands, Scratch(ctx, operands).geometry,
                             image.kernel_memory(memory), stream_of(ctx)),
        "plan of mla_decode");
}

void mla_decode(const OpContext& ctx, const fovea::MlaDecodeParams& p) {
  const CurrentDevice current(ctx.memory.device);
  Operands operands = operands_of(p);
  const Scratch scratch(ctx, operands);
  const DecodeImage image(*p.schedule, *p.cache);
  WorkspaceScope scope(*ctx.workspace);
  auto* memory = static_cast<std::byte*>(p.prepared.data);
  if (memory == nullptr) {
    memory = scope.take_bytes(image.bytes(scratch.kernel_bytes));
    mla_decode_prepare(ctx, p, memory);
  }
  image.find(ctx, p.block_table, memory, operands);
  check(mla_decode_sm90(operands, scratch.geometry, image.kernel_memory(memory), stream_of(ctx)),
        "mla_decode");
}

}  // namespace fovea::cuda::sm90
