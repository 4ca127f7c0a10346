#include "backends/reference/cached_rows.h"
#include "backends/reference/kernels.h"
#include "backends/reference/rows.h"
#include "backends/reference/split_decode.h"

namespace fovea::reference {
namespace {

class GqaSource {
 public:
  GqaSource(const AttentionDecodeParams& params, WorkspaceScope& scope)
      : params_(params),
        reader_(params.kv, scope),
        group_(params.q.shape[1] / params.kv.num_kv_heads) {}

  void load_query(std::int64_t t, std::int64_t n, double* row) const {
    load(row_of(params_.q, t, n), row);
  }
  void load_key(std::int32_t request, std::int64_t n, std::int64_t key, double* row) const {
    reader_.load_key(request, n / group_, key, row);
  }
  void load_value(std::int32_t request, std::int64_t n, std::int64_t key, double* row) const {
    reader_.load_value(request, n / group_, key, row);
  }

 private:
  const AttentionDecodeParams& params_;
  PagedKvReader reader_;
  std::int64_t group_;  ///< Query heads of a key head.
};

DecodeCall call_of(const AttentionDecodeParams& p) {
  return {.schedule = *p.schedule,
          .variant = p.variant,
          .sm_scale = p.sm_scale,
          .out = p.out,
          .lse = p.lse,
          .sinks = p.sinks,
          .qk_dim = p.q.shape[2]};
}

}  // namespace

std::int64_t attention_decode_scratch(const OpContext&, const AttentionDecodeParams& p) {
  return split_decode_scratch(call_of(p)) + PagedKvReader::scratch(p.kv);
}

void attention_decode(const OpContext& ctx, const AttentionDecodeParams& p) {
  WorkspaceScope scope(*ctx.workspace);
  const DecodeCall call = call_of(p);
  const GqaSource source(p, scope);
  SplitDecode(call, source, scope).run();
}

}  // namespace fovea::reference
