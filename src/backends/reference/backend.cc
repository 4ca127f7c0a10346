#include "backends/reference/backend.h"

#include "backends/reference/kernels.h"

namespace fovea {
namespace {

// Takes every operand that src/ops lets through.
template <class Params>
using Table = Implementation<Params>[1];

constexpr Table<RmsNormParams> kRmsNorm{{"plain", nullptr, nullptr, reference::rms_norm}};
constexpr Table<AddResidualParams> kAddResidual{
    {"plain", nullptr, nullptr, reference::add_residual}};
constexpr Table<RopeParams> kRope{{"plain", nullptr, nullptr, reference::rope}};
constexpr Table<KvAppendParams> kKvAppend{{"plain", nullptr, nullptr, reference::kv_append}};
constexpr Table<GqaAppendParams> kGqaAppend{{"plain", nullptr, nullptr, reference::gqa_append}};
constexpr Table<KvGatherParams> kKvGather{{"plain", nullptr, nullptr, reference::kv_gather}};
constexpr Table<AttentionPrefillParams> kAttentionPrefill{
    {"plain", nullptr, reference::attention_prefill_scratch, reference::attention_prefill}};
constexpr Table<AttentionDecodeParams> kAttentionDecode{
    {"plain", nullptr, reference::attention_decode_scratch, reference::attention_decode}};
constexpr Table<QuantizeQueryParams> kQuantizeQuery{
    {"plain", nullptr, nullptr, reference::quantize_query}};
constexpr Table<MlaDecodeParams> kMlaDecode{
    {"plain", nullptr, reference::mla_decode_scratch, reference::mla_decode}};
constexpr Table<MergeStateParams> kMergeState{{"plain", nullptr, nullptr, reference::merge_state}};
constexpr Table<QuantizeOutputParams> kQuantizeOutput{
    {"plain", nullptr, nullptr, reference::quantize_output}};

constexpr Backend kBackend{
    .name = "reference",
    .rms_norm = kRmsNorm,
    .add_residual = kAddResidual,
    .rope = kRope,
    .kv_append = kKvAppend,
    .gqa_append = kGqaAppend,
    .kv_gather = kKvGather,
    .attention_prefill = kAttentionPrefill,
    .attention_decode = kAttentionDecode,
    .quantize_query = kQuantizeQuery,
    .mla_decode = kMlaDecode,
    .merge_state = kMergeState,
    .quantize_output = kQuantizeOutput,
};

}  // namespace

const Backend& reference_backend() { return kBackend; }

}  // namespace fovea
