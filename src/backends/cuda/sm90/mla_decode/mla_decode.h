// Host side of MLA decode on compute capability 9.0.
#pragma once

#include "backends/cuda/sm90/mla_decode/params.h"

namespace fovea::cuda {

/// Null, or why the kernel does not take these operands. Reads no device memory.
const char* mla_decode_sm90_declines(const MlaDecodeParams& params);

/// A geometry for that many requests, query tokens and heads on the current device. Queries the
/// device: call it when planning, not per launch.
cudaError_t mla_decode_sm90_geometry(const MlaDecodeParams& params, MlaDecodeGeometry* geometry);

/// Device memory for the schedule and for partial results, 256-byte aligned. Depends on the
/// geometry alone.
std::size_t mla_decode_sm90_workspace_bytes(const MlaDecodeGeometry& geometry);

/// Writes the schedule of the batch's current lengths to the workspace: one small kernel, to be run
/// whenever query_start_loc or seq_lens have changed. May be captured in a graph.
cudaError_t mla_decode_sm90_plan(const MlaDecodeParams& params, const MlaDecodeGeometry& geometry,
                                 void* workspace, cudaStream_t stream);

/// One launch, merge of split keys included. Allocates nothing. Where the kernel before it in the
/// stream lets the next one start early, the schedule, block_table, query_start_loc and seq_lens
/// must be older than that kernel: they are read before it has ended. One launch at a time may use
/// a workspace.
cudaError_t mla_decode_sm90(const MlaDecodeParams& params, const MlaDecodeGeometry& geometry,
                            void* workspace, cudaStream_t stream);

}  // namespace fovea::cuda
