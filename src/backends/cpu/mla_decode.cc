#include "backends/cpu/formats/stored_heads.h"
#include "backends/cpu/formats/stored_pairs.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/paged_rows.h"
#include "backends/cpu/split_decode.h"

namespace fovea::cpu {
namespace {

/// Keys, and in their first channels values, of one request.
class LatentRows {
 public:
  LatentRows(const Kernels& kernels, const MlaDecodeParams& params, std::int32_t request)
      : kernels_(kernels),
        format_(params.cache->format()),
        rows_(*params.cache, params.block_table, request) {}

  void load(FloatState& state, const KeyInterval& tile, const KeyInterval& next) const {
    const StoredHeads heads(kernels_, format_, 1);
    rows_.for_each(tile, [&](std::int64_t position, const std::byte* row) {
      heads.load(row, 0, state.key(position - tile.begin));
    });
    rows_.for_each(next, [&](std::int64_t, const std::byte* row) { heads.prefetch(row, 0); });
  }

  void load(PairState& state, const KeyInterval& tile, const KeyInterval& next) const {
    const StoredPairs heads(kernels_, format_, 1);
    rows_.for_each(tile, [&](std::int64_t position, const std::byte* row) {
      const std::int64_t i = position - tile.begin;
      float scales[ChannelGroups::kMax];
      const std::byte* codes = state.int8_keys()
                                   ? heads.load_int16(row, 0, state.key_copy(i), scales)
                                   : heads.load(row, 0, state.key_copy(i), scales);
      state.set_key(i, codes, scales);
    });
    rows_.for_each(next, [&](std::int64_t position, const std::byte* row) {
      state.set_next_key(position - next.begin, row);
    });
    state.finish_load(tile.size(), next.size());
  }

  void load(InPlaceState& state, const KeyInterval& tile, const KeyInterval& next) const {
    load_keys_in_place(rows_, format_, 0, tile, next, state);
  }

 private:
  const Kernels& kernels_;
  const KvFormat& format_;
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
  const std::int64_t channels = latent + params.q_pe.shape[2];
  const KvFormat& format = params.cache->format();
  return DecodeCall{.schedule = *params.schedule,
                    .variant = params.variant,
                    .out = params.out,
                    .lse = params.lse,
                    .sinks = params.sinks,
                    .num_kv_heads = 1,
                    .shape = {.qk_channels = channels,
                              .v_channels = latent,
                              .values_in_keys = true,
                              .int8_keys = meets_fixed_point(format, params.q_latent.dtype),
                              .int8_values = meets_fixed_point(format, params.q_latent.dtype,
                                                               params.out.dtype),
                              .bf16_keys = format.dtype == DType::bf16,
                              .score_factor = params.sm_scale * std::numbers::log2e_v<float>,
                              .k_groups = StoredPairs::groups(format, channels),
                              .v_groups = StoredPairs::groups(format, latent)}};
}

bool takes_pairs(const Kernels& kernels, const MlaDecodeParams& params) {
  const std::int64_t channels = params.q_latent.shape[2] + params.q_pe.shape[2];
  return params.q_latent.dtype == DType::bf16 && channels % 2 == 0 &&
         StoredPairs::takes(kernels, params.cache->format(), params.q_latent.shape[2]);
}

}  // namespace

std::int64_t mla_decode_bytes(const Kernels& kernels, const OpContext&,
                              const MlaDecodeParams& params) {
  return split_decode_bytes(kernels, call_of(params), params.q_latent.dtype);
}

void mla_decode(const Kernels& kernels, const OpContext& ctx, const MlaDecodeParams& params) {
  const DecodeCall call = call_of(params);
  const StateKind kind = state_kind(kernels, call, takes_pairs(kernels, params),
                                    InPlaceRows::takes(params.cache->format()));
  run_split_decode(kernels, ctx, call, params.q_latent.dtype, kind, MlaSource(kernels, params));
}

}  // namespace fovea::cpu
