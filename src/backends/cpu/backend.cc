#include "backends/cpu/backend.h"

#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace fovea {
namespace {

constexpr char kScalar[] = "scalar";
constexpr char kAvx2[] = "avx2";
constexpr char kAvx512[] = "avx512";
constexpr char kAvx512Bf16[] = "avx512_bf16";
constexpr char kNeon[] = "neon";

/// An op over one instruction set's kernels.
template <const cpu::Kernels& kernels, class Params,
          void (*op)(const cpu::Kernels&, const OpContext&, const Params&)>
void run(const OpContext& ctx, const Params& params) {
  op(kernels, ctx, params);
}

/// Scratch of an op over one instruction set's kernels.
template <const cpu::Kernels& kernels, class Params,
          std::int64_t (*bytes)(const cpu::Kernels&, const OpContext&, const Params&)>
std::int64_t scratch(const OpContext& ctx, const Params& params) {
  return bytes(kernels, ctx, params);
}

/// Every op takes every compute dtype, format, width and stride, but for what the appends say.
template <const char* isa, const cpu::Kernels& kernels>
struct Table {
  static constexpr Implementation<RmsNormParams> kRmsNorm{
      isa, nullptr, nullptr, run<kernels, RmsNormParams, cpu::rms_norm>};
  static constexpr Implementation<RopeParams> kRope{isa, nullptr, nullptr,
                                                    run<kernels, RopeParams, cpu::rope>};
  static constexpr Implementation<KvAppendParams> kKvAppend{
      isa, cpu::kv_append_declines, nullptr, run<kernels, KvAppendParams, cpu::kv_append>};
  static constexpr Implementation<GqaAppendParams> kGqaAppend{
      isa, cpu::gqa_append_declines, nullptr, run<kernels, GqaAppendParams, cpu::gqa_append>};
  static constexpr Implementation<KvGatherParams> kKvGather{
      isa, nullptr, nullptr, run<kernels, KvGatherParams, cpu::kv_gather>};
  static constexpr Implementation<AttentionPrefillParams> kAttentionPrefill{
      isa, nullptr, scratch<kernels, AttentionPrefillParams, cpu::attention_prefill_bytes>,
      run<kernels, AttentionPrefillParams, cpu::attention_prefill>};
  static constexpr Implementation<AttentionDecodeParams> kAttentionDecode{
      isa, nullptr, scratch<kernels, AttentionDecodeParams, cpu::attention_decode_bytes>,
      run<kernels, AttentionDecodeParams, cpu::attention_decode>};
  static constexpr Implementation<QuantizeQueryParams> kQuantizeQuery{
      isa, nullptr, nullptr, run<kernels, QuantizeQueryParams, cpu::quantize_query>};
  static constexpr Implementation<MlaDecodeParams> kMlaDecode{
      isa, nullptr, scratch<kernels, MlaDecodeParams, cpu::mla_decode_bytes>,
      run<kernels, MlaDecodeParams, cpu::mla_decode>};
  static constexpr Implementation<MergeStateParams> kMergeState{
      isa, nullptr, nullptr, run<kernels, MergeStateParams, cpu::merge_state>};
  static constexpr Implementation<QuantizeOutputParams> kQuantizeOutput{
      isa, nullptr, nullptr, run<kernels, QuantizeOutputParams, cpu::quantize_output>};

  static constexpr Backend kBackend{
      .name = "cpu",
      .rms_norm = {&kRmsNorm, 1},
      .add_residual = {},  // The reference has it, and shares its rows among the threads.
      .rope = {&kRope, 1},
      .kv_append = {&kKvAppend, 1},
      .gqa_append = {&kGqaAppend, 1},
      .kv_gather = {&kKvGather, 1},
      .attention_prefill = {&kAttentionPrefill, 1},
      .attention_decode = {&kAttentionDecode, 1},
      .quantize_query = {&kQuantizeQuery, 1},
      .mla_decode = {&kMlaDecode, 1},
      .merge_state = {&kMergeState, 1},
      .quantize_output = {&kQuantizeOutput, 1},
  };
};

}  // namespace

const Backend* cpu_backend(Isa isa) {
  if (!has_isa(isa)) return nullptr;
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2:
      return &Table<kAvx2, cpu::avx2::kKernels>::kBackend;
    case Isa::avx512:
      return &Table<kAvx512, cpu::avx512::kKernels>::kBackend;
    case Isa::avx512_bf16:
      return &Table<kAvx512Bf16, cpu::avx512_bf16::kKernels>::kBackend;
#elif defined(__aarch64__)
    case Isa::neon:
      return &Table<kNeon, cpu::neon::kKernels>::kBackend;
#endif
    default:
      return &Table<kScalar, cpu::scalar::kKernels>::kBackend;
  }
}

}  // namespace fovea
