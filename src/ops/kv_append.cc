#include "ops/checks.h"
#include "ops/dispatch.h"

namespace fovea {
namespace {

void validate(const KvAppendParams& p) {
  const char* op = kKvAppend.name;
  const Argument kv_c{op, "kv_c"}, k_pe{op, "k_pe"}, slots{op, "slot_mapping"};
  check_view(kv_c, p.kv_c, {{"T"}, {"L"}});
  check_compute_dtype(kv_c, p.kv_c);
  const std::int64_t tokens = p.kv_c.shape[0];
  check_view(k_pe, p.k_pe, {{"T", tokens}, {"R"}});
  check_dtype(k_pe, p.k_pe, p.kv_c.dtype);
  check_view(slots, p.slot_mapping, {{"T", tokens}});
  check_index_dtype(slots, p.slot_mapping);
  check_latent_cache(op, p.cache, p.kv_c.shape[1], p.k_pe.shape[1]);

  check_data(kv_c, p.kv_c);
  check_data(k_pe, p.k_pe);
  check_data(slots, p.slot_mapping);
  const TensorView rows = bytes_of_rows(*p.cache);
  check_disjoint({op, "cache"}, rows, "kv_c", p.kv_c);
  check_disjoint({op, "cache"}, rows, "k_pe", p.k_pe);
  check_disjoint({op, "cache"}, rows, "slot_mapping", p.slot_mapping);
  check_slots(op, p.slot_mapping, p.cache->num_slots());
}

}  // namespace

void kv_append(const OpContext& ctx, const KvAppendParams& params) {
  check_devices(ctx, kKvAppend.name,
                {{"kv_c", params.kv_c}, {"k_pe", params.k_pe},
                 {"slot_mapping", params.slot_mapping}, {"cache", params.cache}});
  validate(params);
  if (params.kv_c.shape[0] == 0) return;
  run(ctx, select(ctx, kKvAppend, params), params);
}

}  // namespace fovea
