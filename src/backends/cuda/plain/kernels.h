// A kernel for each op: right for all operands on any GPU from compute capability 8.0.
#pragma once

#include "fovea/ops.h"

namespace fovea::cuda::plain {

void rms_norm(const OpContext& ctx, const RmsNormParams& params);
void add_residual(const OpContext& ctx, const AddResidualParams& params);
void rope(const OpContext& ctx, const RopeParams& params);
void kv_append(const OpContext& ctx, const KvAppendParams& params);
void gqa_append(const OpContext& ctx, const GqaAppendParams& params);
void kv_gather(const OpContext& ctx, const KvGatherParams& params);
void merge_state(const OpContext& ctx, const MergeStateParams& params);
void quantize_query(const OpContext& ctx, const QuantizeQueryParams& params);
void quantize_output(const OpContext& ctx, const QuantizeOutputParams& params);
void write_padding_rows(const OpContext& ctx, std::int64_t num_actual, const TensorView& out,
                        const TensorView& lse);

const char* attention_prefill_declines(const AttentionPrefillParams& params);
std::int64_t attention_prefill_scratch(const OpContext& ctx, const AttentionPrefillParams& params);
void attention_prefill(const OpContext& ctx, const AttentionPrefillParams& params);
const char* attention_decode_declines(const AttentionDecodeParams& params);
std::int64_t attention_decode_scratch(const OpContext& ctx, const AttentionDecodeParams& params);
void attention_decode(const OpContext& ctx, const AttentionDecodeParams& params);
void attention_decode_prepare(const OpContext& ctx, const AttentionDecodeParams& params,
                              std::byte* scratch);
const char* mla_decode_declines(const MlaDecodeParams& params);
std::int64_t mla_decode_scratch(const OpContext& ctx, const MlaDecodeParams& params);
void mla_decode(const OpContext& ctx, const MlaDecodeParams& params);
void mla_decode_prepare(const OpContext& ctx, const MlaDecodeParams& params, std::byte* scratch);

}  // namespace fovea::cuda::plain
