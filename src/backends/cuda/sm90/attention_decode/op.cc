#include "backends/cuda/sm90/attention_decode/op.h"

#include "backends/cuda/launch.h"
#include "backends/cuda/sm90/attention_decode/attention_decode.h"
#include "backends/cuda/sm90/decode_image.h"

namespace fovea::cuda::sm90 {
namespace {

/// What the kernel has no code for. The rest is attention_decode_sm90_declines's.
const char* why_not(const AttentionDecodeParams& p) {
  if (p.q.strides[2] != 1 || p.out.strides[2] != 1) {
    return "query and output rows must have unit innermost strides";
  }
  if (p.sinks.ndim > 0 && p.sinks.strides[0] != 1) return "sinks must be contiguous";
  const KvFormat &k = p.kv.k_cache->format(), &v = p.kv.v_cache->format();
  if (k.scales != v.scales || k.dtype != v.dtype) return "keys and values must have one format";
  switch (k.scales) {
    case KvScales::none:
      return k.dtype == p.q.dtype ? nullptr : "dense blocks must hold the queries' dtype";
    case KvScales::per_tensor:
      return nullptr;
    default:
      return 2 * k.first_group == p.q.shape[2] && 2 * v.first_group == p.out.shape[2]
                 ? nullptr
                 : "scales must be of the halves of a head";
  }
}

/// Everything but the plan's arrays, which are on the host yet.
DecodeParams operands_of(const AttentionDecodeParams& p) {
  DecodeParams o;
  o.num_requests = static_cast<std::int32_t>(p.schedule->seq_lens.size());
  o.num_heads = static_cast<std::int32_t>(p.q.shape[1]);
  o.num_kv_heads = static_cast<std::int32_t>(p.kv.num_kv_heads);
  o.qk_dim = static_cast<std::int32_t>(p.q.shape[2]);
  o.v_dim = static_cast<std::int32_t>(p.out.shape[2]);
  o.type = element_type(p.q.dtype);
  o.q = p.q.data;
  o.q_row_stride = p.q.strides[0];
  o.q_head_stride = p.q.strides[1];
  o.format = cache_format(p.kv.k_cache->format());
  o.k_scale = p.kv.k_cache->format().scale;
  o.v_scale = p.kv.v_cache->format().scale;
  o.k_cache = head_rows(*p.kv.k_cache, o.num_kv_heads, o.qk_dim);
  o.v_cache = head_rows(*p.kv.v_cache, o.num_kv_heads, o.v_dim);
  o.out_type = element_type(p.out.dtype);
  o.out = p.out.data;
  o.out_row_stride = p.out.strides[0];
  o.out_head_stride = p.out.strides[1];
  o.lse = static_cast<float*>(p.lse.data);
  o.lse_head_stride = p.lse.strides[0];
  o.lse_row_stride = p.lse.strides[1];
  o.sm_scale = p.sm_scale;
  o.variant = p.variant;
  // Windows and chunks as long as every sequence hide nothing; longer ones may not fit.
  const std::int32_t longest = DecodeImage(*p.schedule, *p.kv.k_cache).longest();
  if (o.variant.window_left >= longest) o.variant.window_left = -1;
  if (o.variant.attention_chunk >= longest) o.variant.attention_chunk = 0;
  o.sinks = static_cast<const float*>(p.sinks.data);
  return o;
}

std::int64_t kernel_scratch(const OpContext& ctx, const DecodeParams& operands) {
  const CurrentDevice current(ctx.memory.device);
  std::size_t bytes = 0;
  check(attention_decode_sm90_workspace_bytes(operands, &bytes), "workspace of attention_decode");
  return static_cast<std::int64_t>(bytes);
}

}  // namespace

const char* attention_decode_declines(const AttentionDecodeParams& p) {
  const char* reason = why_not(p);
  return reason ? reason : attention_decode_sm90_declines(operands_of(p));
}

std::int64_t attention_decode_scratch(const OpContext& ctx, const AttentionDecodeParams& p) {
  return DecodeImage(*p.schedule, *p.kv.k_cache).bytes(kernel_scratch(ctx, operands_of(p)));
}

void attention_decode_prepare(const OpContext& ctx, const AttentionDecodeParams& p,
                              std::byte* memory) {
  const CurrentDevice current(ctx.memory.device);
  DecodeParams operands = operands_of(p);
  const DecodeImage image(*p.schedule, *p.kv.k_cache);
  image.send(ctx, p.kv.block_table, p.variant, memory);
  image.find(ctx, p.kv.block_table, memory, operands);
  check(attention_decode_sm90_plan(operands, image.kernel_memory(memory), stream_of(ctx)),
        "plan of attention_decode");
}

void attention_decode(const OpContext& ctx, const AttentionDecodeParams& p) {
  const CurrentDevice current(ctx.memory.device);
  DecodeParams operands = operands_of(p);
  const DecodeImage image(*p.schedule, *p.kv.k_cache);
  WorkspaceScope scope(*ctx.workspace);
  auto* memory = static_cast<std::byte*>(p.prepared.data);
  if (memory == nullptr) {
    memory = scope.take_bytes(image.bytes(kernel_scratch(ctx, operands)));
    attention_decode_prepare(ctx, p, memory);
  }
  image.find(ctx, p.kv.block_table, memory, operands);
  check(attention_decode_sm90(operands, image.kernel_memory(memory), stream_of(ctx)),
        "attention_decode");
}

}  // namespace fovea::cuda::sm90
