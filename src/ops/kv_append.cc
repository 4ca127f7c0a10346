#include <cmath>

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/rope_angles.h"

namespace fovea {
namespace {

void validate_norm(const KvAppendParams& p) {
  if (!p.norm_weight) return;
  const Argument weight{kKvAppend.name, "norm_weight"};
  check_view(weight, p.norm_weight, {{"L", p.kv_c.shape[1]}});
  check_compute_dtype(weight, p.norm_weight);
  check_data(weight, p.norm_weight);
  FOVEA_CHECK(std::isfinite(p.norm_eps) && p.norm_eps >= 0.f, invalid_argument,
              "{}: norm_eps is {}; it must be finite and not negative", kKvAppend.name, p.norm_eps);
}

void validate_rotation(const KvAppendParams& p) {
  const char* op = kKvAppend.name;
  if (p.rope.cos_sin.ndim == 0) return check_no_angles(op, p.rope);
  const std::int64_t rope_dim = p.k_pe.shape[1];
  FOVEA_CHECK(rope_dim % 2 == 0, invalid_argument, "{}: k_pe is {}; R must be even to turn", op,
              to_string(p.k_pe));
  check_rope_angles(op, p.rope, p.kv_c.shape[0], rope_dim);
  check_rope_data(op, p.rope);
}

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
  validate_norm(p);
  validate_rotation(p);

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
  KvAppendParams flat = params;
  if (params.rope.cos_sin.ndim > 0) flat.rope.positions = flat_positions(params.rope);
  check_devices(ctx, kKvAppend.name,
                {{"kv_c", params.kv_c}, {"k_pe", params.k_pe},
                 {"slot_mapping", params.slot_mapping}, {"cache", params.cache},
                 {"norm_weight", params.norm_weight}, {"positions", params.rope.positions},
                 {"cos_sin", params.rope.cos_sin}});
  validate(flat);
  if (params.kv_c.shape[0] == 0) return;
  run(ctx, select(ctx, kKvAppend, flat), flat);
}

}  // namespace fovea
