// Host side of attention prefill on compute capability 9.0.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/sm90/attention_prefill/params.h"

namespace fovea::cuda {

constexpr int kPrefillQueryTile = 128;  ///< Rows of a QueryTile.

/// Null, or why the kernel does not take these operands. Looks neither at tiles nor at the counter,
/// and reads no device memory.
const char* attention_prefill_sm90_declines(const PrefillParams& params);

/// PrefillParams::heads_at_once for requests of up to that many keys.
std::int32_t prefill_heads_at_once(const PrefillParams& params, std::int64_t max_keys);

/// One launch. Allocates nothing.
cudaError_t attention_prefill_sm90(const PrefillParams& params, cudaStream_t stream);

}  // namespace fovea::cuda
