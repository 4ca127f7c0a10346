#include "backends/cuda/backend.h"

#include <cuda_runtime_api.h>

#include "backends/cuda/graph.h"
#include "backends/cuda/peaks.h"
#include "backends/cuda/plain/kernels.h"
#include "backends/cuda/sm90/attention_decode/op.h"
#include "backends/cuda/sm90/attention_prefill/op.h"
#include "backends/cuda/sm90/mla_decode/op.h"

namespace fovea {
namespace {

using namespace cuda;

template <class Params>
using Plain = Implementation<Params>[1];

constexpr Plain<RmsNormParams> kRmsNorm{{"plain", nullptr, nullptr, plain::rms_norm}};
constexpr Plain<AddResidualParams> kAddResidual{
    {"plain", nullptr, nullptr, plain::add_residual}};
constexpr Plain<RopeParams> kRope{{"plain", nullptr, nullptr, plain::rope}};
constexpr Plain<KvAppendParams> kKvAppend{{"plain", nullptr, nullptr, plain::kv_append}};
constexpr Plain<GqaAppendParams> kGqaAppend{{"plain", nullptr, nullptr, plain::gqa_append}};
constexpr Plain<KvGatherParams> kKvGather{{"plain", nullptr, nullptr, plain::kv_gather}};
constexpr Plain<QuantizeQueryParams> kQuantizeQuery{
    {"plain", nullptr, nullptr, plain::quantize_query}};
// The kernels of one chip come first.
constexpr Implementation<AttentionPrefillParams> kAttentionPrefill[] = {
    {"sm90", sm90::attention_prefill_declines, sm90::attention_prefill_scratch,
     sm90::attention_prefill},
    {"plain", plain::attention_prefill_declines, plain::attention_prefill_scratch,
     plain::attention_prefill}};
constexpr Implementation<AttentionDecodeParams> kAttentionDecode[] = {
    {"sm90", sm90::attention_decode_declines, sm90::attention_decode_scratch,
     sm90::attention_decode, sm90::attention_decode_prepare},
    {"plain", plain::attention_decode_declines, plain::attention_decode_scratch,
     plain::attention_decode, plain::attention_decode_prepare}};
constexpr Implementation<MlaDecodeParams> kMlaDecode[] = {
    {"sm90", sm90::mla_decode_declines, sm90::mla_decode_scratch, sm90::mla_decode,
     sm90::mla_decode_prepare},
    {"plain", plain::mla_decode_declines, plain::mla_decode_scratch, plain::mla_decode,
     plain::mla_decode_prepare}};
constexpr Plain<MergeStateParams> kMergeState{{"plain", nullptr, nullptr, plain::merge_state}};
constexpr Plain<QuantizeOutputParams> kQuantizeOutput{
    {"plain", nullptr, nullptr, plain::quantize_output}};

/// Pinned, registered or managed memory.
bool addresses_host_memory(const void* memory) {
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
    cudaGetLastError();  // Not an error of the next launch.
    return false;
  }
  return attributes.devicePointer == memory;
}

template <bool has_sm90>
constexpr Backend kBackend{
    .name = "cuda",
    .rms_norm = kRmsNorm,
    .add_residual = kAddResidual,
    .rope = kRope,
    .kv_append = kKvAppend,
    .gqa_append = kGqaAppend,
    .kv_gather = kKvGather,
    .attention_prefill = std::span(kAttentionPrefill).subspan(has_sm90 ? 0 : 1),
    .attention_decode = std::span(kAttentionDecode).subspan(has_sm90 ? 0 : 1),
    .quantize_query = kQuantizeQuery,
    .mla_decode = std::span(kMlaDecode).subspan(has_sm90 ? 0 : 1),
    .merge_state = kMergeState,
    .quantize_output = kQuantizeOutput,
    .write_padding_rows = plain::write_padding_rows,
    .capture = capture,
    .launch = launch_kept,
    .addresses_host_memory = addresses_host_memory,
    .measure_peaks = has_sm90 ? sm90::measure_peaks : measure_peaks,
};

}  // namespace

const Backend& cuda_backend(int major) { return major == 9 ? kBackend<true> : kBackend<false>; }

}  // namespace fovea
