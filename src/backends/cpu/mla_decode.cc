#include "backends/cpu/formats/stored_heads.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/paged_rows.h"
#include "backends/cpu/split_decode.h"

namespace fovea::cpu {
namespace {

/// Keys, and in their first channels values, of one request.
class LatentRows {
 public:
  LatentRows(const Kernels& kernels, const MlaDecodeParams& params, std::int32_t request)
      : heads_(kernels, params.cache->format(), 1),
        rows_(*params.cache, params.block_table, request) {}

  void load(AttendState& state, const KeyInterval& tile) const {
    rows_.for_each(tile, [&](std::int64_t position, const std::byte* row) {
      heads_.load(row, 0, state.key(position - tile.begin));
    });
  }
  void prefetch(const KeyInterval& tile) const {
    rows_.for_each(tile, [&](std::int64_t, const std::byte* row) { heads_.prefetch(row, 0); });
  }

 private:
  StoredHeads heads_;
  PagedRows rows_;
};

/// Latent rows are the one key head that all query heads share.
class MlaSource {
 public:
  MlaSource(const Kernels& kernels, const MlaDecodeParams& params)
      : kernels_(kernels), params_(params) {}

  /// [latent | rope]
  void load_query(std::int64_t t, std::int64_t n, float* query) const {
    const std::int64_t latent = params_.q_latent.shape[2];
    load(params_.q_latent, t, n, query);
    load(params_.q_pe, t, n, query + latent);
  }
  LatentRows keys(std::int32_t request, std::int64_t) const { return {kernels_, params_, request}; }

 private:
  void load(const TensorView& q, std::int64_t t, std::int64_t n, float* dst) const {
    const std::int64_t width = q.shape[2];
    if (q.dtype != DType::f8e4m3fn) return load_row(kernels_, row_of(q, {t, n}), width, dst);
    const auto* codes = q.ptr<Float8E4M3FN>({t, n, 0});
    if (q.strides[2] == 1) {
      kernels_.load_codes[static_cast<int>(Codes::f8e4m3fn)](codes, width, params_.q_scale, dst);
      return;
    }
    for (std::int64_t i = 0; i < width; ++i) {
      dst[i] = to_float(codes[i * q.strides[2]]) * params_.q_scale;
    }
  }

  const Kernels& kernels_;
  const MlaDecodeParams& params_;
};

DecodeCall call_of(const MlaDecodeParams& params) {
  const std::int64_t latent = params.q_latent.shape[2];
  return DecodeCall{.schedule = *params.schedule,
                    .variant = params.variant,
                    .sm_scale = params.sm_scale,
                    .out = params.out,
                    .lse = params.lse,
                    .sinks = params.sinks,
                    .num_kv_heads = 1,
                    .shape = {.qk_channels = latent + params.q_pe.shape[2],
                              .v_channels = latent,
                              .values_in_keys = true}}
      .finished();
}

}  // namespace

std::int64_t mla_decode_bytes(const OpContext&, const MlaDecodeParams& params) {
  return split_decode_bytes(call_of(params));
}

void mla_decode(const Kernels& kernels, const OpContext& ctx, const MlaDecodeParams& params) {
  WorkspaceScope scope(*ctx.workspace);
  const DecodeCall call = call_of(params);
  const MlaSource source(kernels, params);
  SplitDecode decode(kernels, call, source, scope);
  decode.run(*ctx.pool);
}

}  // namespace fovea::cpu
