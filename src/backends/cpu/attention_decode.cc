#include "backends/cpu/ops.h"
#include "backends/cpu/paged_kv_rows.h"
#include "backends/cpu/split_decode.h"

namespace fovea::cpu {
namespace {

class GqaSource {
 public:
  GqaSource(const Kernels& kernels, const AttentionDecodeParams& params)
      : kernels_(kernels), params_(params) {}

  void load_query(std::int64_t t, std::int64_t n, float* query) const {
    load_row(kernels_, row_of(params_.q, {t, n}), params_.q.shape[2], query);
  }
  PagedKvRows keys(std::int32_t request, std::int64_t kv_head) const {
    return {kernels_, params_.kv, request, kv_head};
  }

 private:
  const Kernels& kernels_;
  const AttentionDecodeParams& params_;
};

DecodeCall call_of(const AttentionDecodeParams& params) {
  const PagedKv& kv = params.kv;
  const std::int64_t qk_channels = params.q.shape[2], v_channels = params.out.shape[2];
  return DecodeCall{.schedule = *params.schedule,
                    .variant = params.variant,
                    .out = params.out,
                    .lse = params.lse,
                    .sinks = params.sinks,
                    .num_kv_heads = kv.num_kv_heads,
                    .shape = {.qk_channels = qk_channels,
                              .v_channels = v_channels,
                              .int8_keys =
                                  meets_fixed_point(kv.k_cache->format(), params.q.dtype),
                              .int8_values = meets_fixed_point(
                                  kv.v_cache->format(), params.q.dtype, params.out.dtype),
                              .bf16_keys = kv.k_cache->format().dtype == DType::bf16,
                              .score_factor = params.sm_scale * std::numbers::log2e_v<float>,
                              .k_groups = StoredPairs::groups(kv.k_cache->format(), qk_channels),
                              .v_groups = StoredPairs::groups(kv.v_cache->format(), v_channels)}};
}

bool takes_pairs(const Kernels& kernels, const AttentionDecodeParams& params) {
  return params.q.dtype == DType::bf16 &&
         PagedKvRows::takes_pairs(kernels, params.kv, params.q.shape[2], params.out.shape[2]);
}

}  // namespace

std::int64_t attention_decode_bytes(const Kernels& kernels, const OpContext&,
                                    const AttentionDecodeParams& params) {
  return split_decode_bytes(kernels, call_of(params), params.q.dtype);
}

void attention_decode(const Kernels& kernels, const OpContext& ctx,
                      const AttentionDecodeParams& params) {
  const DecodeCall call = call_of(params);
  const StateKind kind = state_kind(kernels, call, takes_pairs(kernels, params),
                                    PagedKvRows::takes_in_place(params.kv));
  run_split_decode(kernels, ctx, call, params.q.dtype, kind, GqaSource(kernels, params));
}

}  // namespace fovea::cpu
