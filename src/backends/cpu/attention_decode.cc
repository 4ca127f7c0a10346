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
  return DecodeCall{.schedule = *params.schedule,
                    .variant = params.variant,
                    .sm_scale = params.sm_scale,
                    .out = params.out,
                    .lse = params.lse,
                    .sinks = params.sinks,
                    .num_kv_heads = params.kv.num_kv_heads,
                    .shape = {.qk_channels = params.q.shape[2], .v_channels = params.out.shape[2]}}
      .finished();
}

}  // namespace

std::int64_t attention_decode_bytes(const OpContext&, const AttentionDecodeParams& params) {
  return split_decode_bytes(call_of(params));
}

void attention_decode(const Kernels& kernels, const OpContext& ctx,
                      const AttentionDecodeParams& params) {
  WorkspaceScope scope(*ctx.workspace);
  const DecodeCall call = call_of(params);
  const GqaSource source(kernels, params);
  SplitDecode decode(kernels, call, source, scope);
  decode.run(*ctx.pool);
}

}  // namespace fovea::cpu
