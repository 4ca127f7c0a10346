#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/paged_kv.h"
#include "ops/rope_angles.h"

namespace fovea {
namespace {

void validate_rotation(const GqaAppendParams& p) {
  const char* op = kGqaAppend.name;
  check_view({op, "cos_sin"}, p.rope.cos_sin, {{"max_position"}, {"R"}});
  const std::int64_t rope_dim = p.rope.cos_sin.shape[1];
  FOVEA_CHECK(rope_dim <= p.k.shape[2] && rope_dim % 2 == 0, invalid_argument,
              "{}: cos_sin is {}; R must be even and at most Dk = {}", op,
              to_string(p.rope.cos_sin), p.k.shape[2]);
  check_rope_angles(op, p.rope, p.k.shape[0], rope_dim);
  check_rope_data(op, p.rope);
}

void validate(const GqaAppendParams& p) {
  const char* op = kGqaAppend.name;
  const Argument k{op, "k"}, v{op, "v"}, slots{op, "slot_mapping"};
  check_view(k, p.k, {{"T"}, {"Hk"}, {"Dk"}});
  check_compute_dtype(k, p.k);
  const std::int64_t tokens = p.k.shape[0];
  const std::int64_t heads = p.k.shape[1];
  check_view(v, p.v, {{"T", tokens}, {"Hk", heads}, {"Dv"}});
  check_dtype(v, p.v, p.k.dtype);
  check_view(slots, p.slot_mapping, {{"T", tokens}});
  check_index_dtype(slots, p.slot_mapping);
  check_heads_cache(op, p.k_cache, heads, p.k.shape[2], "Hk * Dk", "k_cache");
  check_heads_cache(op, p.v_cache, heads, p.v.shape[2], "Hk * Dv", "v_cache");
  check_same_blocks(op, *p.k_cache, *p.v_cache);
  if (p.rope.cos_sin.ndim > 0) {
    validate_rotation(p);
  } else {
    check_no_angles(op, p.rope);
  }

  check_data(k, p.k);
  check_data(v, p.v);
  check_data(slots, p.slot_mapping);
  const TensorView k_rows = bytes_of_rows(*p.k_cache), v_rows = bytes_of_rows(*p.v_cache);
  for (const auto& [name, rows] : {std::pair{"k_cache", &k_rows}, std::pair{"v_cache", &v_rows}}) {
    check_disjoint({op, name}, *rows, "k", p.k);
    check_disjoint({op, name}, *rows, "v", p.v);
    check_disjoint({op, name}, *rows, "slot_mapping", p.slot_mapping);
  }
  check_disjoint({op, "k_cache"}, k_rows, "v_cache", v_rows);
  check_slots(op, p.slot_mapping, p.k_cache->num_slots());
}

}  // namespace

void gqa_append(const OpContext& ctx, const GqaAppendParams& params) {
  GqaAppendParams flat = params;
  if (params.rope.cos_sin.ndim > 0) flat.rope.positions = flat_positions(params.rope);
  check_devices(ctx, kGqaAppend.name,
                {{"k", params.k}, {"v", params.v}, {"slot_mapping", params.slot_mapping},
                 {"k_cache", params.k_cache}, {"v_cache", params.v_cache},
                 {"positions", params.rope.positions}, {"cos_sin", params.rope.cos_sin}});
  validate(flat);
  if (params.k.shape[0] == 0) return;
  run(ctx, select(ctx, kGqaAppend, flat), flat);
}

}  // namespace fovea
