// Attention prefill on compute capability 9.0, as the backend's table takes it.
#pragma once

#include "fovea/ops.h"

namespace fovea::cuda::sm90 {

const char* attention_prefill_declines(const AttentionPrefillParams& params);
std::int64_t attention_prefill_scratch(const OpContext& ctx, const AttentionPrefillParams& params);
void attention_prefill(const OpContext& ctx, const AttentionPrefillParams& params);

}  // namespace fovea::cuda::sm90
