#include <algorithm>
#include <span>

#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"
#include "fovea/quant.h"

namespace fovea::cpu {
namespace {

/// A row of n elements as codes.
void quantize_row(const Kernels& kernels, const Row& x, std::int64_t n, float scale,
                  std::byte* codes) {
  for (std::int64_t i = 0; i < n; i += kRowChunk) {
    const std::int64_t count = std::min(kRowChunk, n - i);
    alignas(64) float values[kRowChunk];
    load_row(kernels, x.from(i), count, values);
    quantize_group(DType::f8e4m3fn, {values, static_cast<std::size_t>(count)}, scale,
                   {codes + i, static_cast<std::size_t>(count)});
  }
}

}  // namespace

void quantize_query(const Kernels& kernels, const OpContext& ctx,
                    const QuantizeQueryParams& params) {
  const std::int64_t heads = params.out.shape[1], latent = params.q_latent.shape[2];
  const std::int64_t rope_dim = params.q_pe.shape[2];
  const auto quantize_tokens = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t n = 0; n < heads; ++n) {
        auto* codes = reinterpret_cast<std::byte*>(params.out.ptr<Float8E4M3FN>({t, n, 0}));
        quantize_row(kernels, row_of(params.q_latent, {t, n}), latent, params.scale, codes);
        quantize_row(kernels, row_of(params.q_pe, {t, n}), rope_dim, params.scale, codes + latent);
      }
    }
  };
  for_row_ranges(*ctx.pool, params.out.shape[0], heads * (latent + rope_dim), quantize_tokens);
}

}  // namespace fovea::cpu
