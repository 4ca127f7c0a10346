// The kernel as an implementation of the op mla_decode.
#pragma once

#include "fovea/ops.h"

namespace fovea::cuda::sm90 {

const char* mla_decode_declines(const fovea::MlaDecodeParams& params);
std::int64_t mla_decode_scratch(const OpContext& ctx, const fovea::MlaDecodeParams& params);
void mla_decode(const OpContext& ctx, const fovea::MlaDecodeParams& params);
void mla_decode_prepare(const OpContext& ctx, const fovea::MlaDecodeParams& params,
                        std::byte* memory);

}  // namespace fovea::cuda::sm90
