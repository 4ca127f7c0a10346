#include "backends/reference/cached_rows.h"
#include "backends/reference/kernels.h"
#include "backends/reference/rows.h"
#include "backends/reference/split_decode.h"

namespace fovea::reference {
namespace {

/// All heads read the same rows: a key is [kv_c | k_pe], a value its kv_c.
class LatentSource {
 public:
  LatentSource(const MlaDecodeParams& params, WorkspaceScope& scope)
      : params_(params), reader_(params.cache->format(), 1, scope) {}

  void load_query(std::int64_t t, std::int64_t n, double* row) const {
    load_part(params_.q_latent, t, n, row);
    load_part(params_.q_pe, t, n, row + params_.q_latent.shape[2]);
  }
  void load_key(std::int32_t request, std::int64_t, std::int64_t key, double* row) const {
    reader_.load(cached_row(*params_.cache, params_.block_table, request, key), 0, row);
  }
  void load_value(std::int32_t request, std::int64_t, std::int64_t key, double* row) const {
    reader_.load(cached_row(*params_.cache, params_.block_table, request, key), 0,
                 params_.q_latent.shape[2], row);
  }

 private:
  void load_part(const TensorView& q, std::int64_t t, std::int64_t n, double* row) const {
    if (q.dtype != DType::f8e4m3fn) return load(row_of(q, t, n), row);
    for (std::int64_t i = 0; i < q.shape[2]; ++i) {
      row[i] = static_cast<double>(widen(*q.ptr<Float8E4M3FN>({t, n, i})) * params_.q_scale);
    }
  }

  const MlaDecodeParams& params_;
  HeadReader reader_;
};

DecodeCall call_of(const MlaDecodeParams& p) {
  return {.schedule = *p.schedule,
          .variant = p.variant,
          .sm_scale = p.sm_scale,
          .out = p.out,
          .lse = p.lse,
          .sinks = p.sinks,
          .qk_dim = p.q_latent.shape[2] + p.q_pe.shape[2]};
}

}  // namespace

std::int64_t mla_decode_scratch(const OpContext&, const MlaDecodeParams& p) {
  return split_decode_scratch(call_of(p)) + HeadReader::scratch(p.cache->format(), 1);
}

void mla_decode(const OpContext& ctx, const MlaDecodeParams& p) {
  WorkspaceScope scope(*ctx.workspace);
  const DecodeCall call = call_of(p);
  const LatentSource source(p, scope);
  SplitDecode(call, source, scope).run();
}

}  // namespace fovea::reference
