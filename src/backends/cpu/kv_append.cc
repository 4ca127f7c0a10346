#include "backends/cpu/formats/stored_heads.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"
#include "ops/index_view.h"

namespace fovea::cpu {

void kv_append(const Kernels& kernels, const OpContext& ctx, const KvAppendParams& params) {
  const PagedKvCache& cache = *params.cache;
  const std::int64_t latent = params.kv_c.shape[1];
  const std::int64_t rope_dim = params.k_pe.shape[1];
  const StoredHeads heads(kernels, cache.format(), 1);
  const bool is_plain = cache.format().scales == KvScales::none;
  const auto append_tokens = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t slot = index_at(params.slot_mapping, t);
      if (slot < 0) continue;
      const Row kv_c = row_of(params.kv_c, {t}), k_pe = row_of(params.k_pe, {t});
      if (is_plain) {
        const Row stored{cache.slot(slot), cache.format().dtype, 1};
        copy_row(kernels, kv_c, latent, stored);
        copy_row(kernels, k_pe, rope_dim, stored.from(latent));
      } else {
        alignas(64) float row[KvFormat::kMaxScaledHead + kMaxLanes];
        load_row(kernels, kv_c, latent, row);
        load_row(kernels, k_pe, rope_dim, row + latent);
        heads.store(row, cache.slot(slot), 0);
      }
    }
  };
  for_row_ranges(*ctx.pool, params.kv_c.shape[0], latent + rope_dim, append_tokens);
}

}  // namespace fovea::cpu
