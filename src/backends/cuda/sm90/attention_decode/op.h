// Grouped-query decode on compute capability 9.0, as the backend's table takes it.
#pragma once

#include "fovea/ops.h"

namespace fovea::cuda::sm90 {

const char* attention_decode_declines(const AttentionDecodeParams& params);
std::int64_t attention_decode_scratch(const OpContext& ctx, const AttentionDecodeParams& params);
void attention_decode(const OpContext& ctx, const AttentionDecodeParams& params);
void attention_decode_prepare(const OpContext& ctx, const AttentionDecodeParams& params,
                              std::byte* memory);

}  // namespace fovea::cuda::sm90
