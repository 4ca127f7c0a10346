// The backend interface: one table of ops.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "fovea/machine_peaks.h"
#include "fovea/ops.h"

namespace fovea {

/// One way to run an op. Params have passed every check of src/ops before any of these is called:
/// an implementation looks only at what it cannot do, never at what is wrong.
template <class Params>
struct Implementation {
  const char* name;
  /// Why it does not take these operands, a static string; nullptr: it takes them. Null: takes all.
  const char* (*declines)(const Params&);
  /// What run() takes of ctx.workspace, each piece rounded with Workspace::rounded. Null: nothing.
  std::int64_t (*workspace_bytes)(const OpContext&, const Params&);
  /// Neither allocates nor throws, except for a workspace that is too small, before it writes.
  void (*run)(const OpContext&, const Params&);
  /// Fills `scratch`, as large as workspace_bytes() says and aligned alike, with what run() needs
  /// of the schedule; run() then takes it from params.prepared. Null: nothing is prepared, nor are
  /// lengths in device memory taken.
  void (*prepare)(const OpContext&, const Params&, std::byte* scratch) = nullptr;
};

/// Rows [num_actual, T) of out [T, N, D] become zeros and those of lse [N, T] (optional) -inf.
void write_padding_rows_on_host(const OpContext& ctx, std::int64_t num_actual,
                                const TensorView& out, const TensorView& lse);

/// Work that a device keeps, see DeviceGraph.
struct KeptWork {
  std::shared_ptr<void> executable;
  std::int64_t num_nodes = 0;
};

/// Implementations of each op in order of preference; an op may have none.
///
/// Rows of `out` and `lse` that the schedule gives to no request (from its last query_start_loc or
/// cu_seqlens_q on) are filled by write_padding_rows: run() writes the schedule's rows, all of
/// them, also those without keys, and touches nothing else.
struct Backend {
  const char* name;
  std::span<const Implementation<RmsNormParams>> rms_norm;
  std::span<const Implementation<AddResidualParams>> add_residual;
  std::span<const Implementation<RopeParams>> rope;
  std::span<const Implementation<KvAppendParams>> kv_append;
  std::span<const Implementation<GqaAppendParams>> gqa_append;
  std::span<const Implementation<KvGatherParams>> kv_gather;
  std::span<const Implementation<AttentionPrefillParams>> attention_prefill;
  std::span<const Implementation<AttentionDecodeParams>> attention_decode;
  std::span<const Implementation<QuantizeQueryParams>> quantize_query;
  std::span<const Implementation<MlaDecodeParams>> mla_decode;
  std::span<const Implementation<MergeStateParams>> merge_state;
  std::span<const Implementation<QuantizeOutputParams>> quantize_output;
  void (*write_padding_rows)(const OpContext&, std::int64_t num_actual, const TensorView& out,
                             const TensorView& lse) = write_padding_rows_on_host;
  /// What `queue` puts on ctx.stream. Null, as launch: work is done when a call returns.
  KeptWork (*capture)(const OpContext& ctx, const std::function<void()>& queue) = nullptr;
  void (*launch)(const OpContext& ctx, const KeptWork& work) = nullptr;
  /// Whether the device can address host memory. Null: its device is the host.
  bool (*addresses_host_memory)(const void* memory) = nullptr;
  /// Null: those of the host's threads are measured.
  MachinePeaks (*measure_peaks)(const OpContext& ctx) = nullptr;
};

}  // namespace fovea
