// MLA decode for any GPU from compute capability 8.0: right for all operands, not fast.
#pragma once

#include "backends/cuda/sm90/mla_decode/params.h"

namespace fovea::cuda {

/// Null, or why the kernel does not take these operands.
const char* mla_decode_plain_declines(const MlaDecodeParams& params);

cudaError_t mla_decode_plain(const MlaDecodeParams& params, cudaStream_t stream);

}  // namespace fovea::cuda
