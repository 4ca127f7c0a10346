// Host side of grouped-query decode on compute capability 9.0.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "backends/cuda/sm90/attention_decode/params.h"

namespace fovea::cuda {

/// Null, or why the kernel does not take these operands. Reads no device memory.
const char* attention_decode_sm90_declines(const DecodeParams& params);

/// Device memory for the schedule and for partial results on the current device, 256-byte aligned.
/// Depends on head widths, the number of key heads and the device, not on lengths or formats.
cudaError_t attention_decode_sm90_workspace_bytes(const DecodeParams& params, std::size_t* bytes);

/// Writes the schedule of the batch's current lengths to the workspace: one small kernel, to be run
/// whenever query_start_loc or seq_lens have changed. May be captured in a graph.
cudaError_t attention_decode_sm90_plan(const DecodeParams& params, void* workspace,
                                       cudaStream_t stream);

/// One launch, merge of split keys included. Allocates nothing. One launch at a time may use a
/// workspace.
cudaError_t attention_decode_sm90(const DecodeParams& params, void* workspace,
                                  cudaStream_t stream);

}  // namespace fovea::cuda
