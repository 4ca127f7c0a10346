// The ops as they are spread over threads and memory, for any instruction set's kernels.
#pragma once

#include "backends/cpu/kernels.h"
#include "fovea/ops.h"

namespace fovea::cpu {

void rms_norm(const Kernels& kernels, const OpContext& ctx, const RmsNormParams& params);
void rope(const Kernels& kernels, const OpContext& ctx, const RopeParams& params);
void kv_append(const Kernels& kernels, const OpContext& ctx, const KvAppendParams& params);
const char* kv_append_declines(const KvAppendParams& params);
void gqa_append(const Kernels& kernels, const OpContext& ctx, const GqaAppendParams& params);
const char* gqa_append_declines(const GqaAppendParams& params);
void kv_gather(const Kernels& kernels, const OpContext& ctx, const KvGatherParams& params);
void merge_state(const Kernels& kernels, const OpContext& ctx, const MergeStateParams& params);

void quantize_query(const Kernels& kernels, const OpContext& ctx,
                    const QuantizeQueryParams& params);
void quantize_output(const Kernels& kernels, const OpContext& ctx,
                     const QuantizeOutputParams& params);

void attention_prefill(const Kernels& kernels, const OpContext& ctx,
                       const AttentionPrefillParams& params);
std::int64_t attention_prefill_bytes(const Kernels& kernels, const OpContext& ctx,
                                     const AttentionPrefillParams& params);

void attention_decode(const Kernels& kernels, const OpContext& ctx,
                      const AttentionDecodeParams& params);
std::int64_t attention_decode_bytes(const Kernels& kernels, const OpContext& ctx,
                                    const AttentionDecodeParams& params);

void mla_decode(const Kernels& kernels, const OpContext& ctx, const MlaDecodeParams& params);
std::int64_t mla_decode_bytes(const Kernels& kernels, const OpContext& ctx,
                              const MlaDecodeParams& params);

}  // namespace fovea::cpu
