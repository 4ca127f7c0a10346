// What ops check of keys and values in blocks.
#pragma once

#include "fovea/ops.h"
#include "ops/checks.h"

namespace fovea {

/// Equal numbers of blocks of equal size: one block table serves both.
void check_same_blocks(const char* op, const PagedKvCache& k_cache, const PagedKvCache& v_cache);

/// Heads and caches fit q [T, N, Dk] and out [T, N, Dv].
void check_paged_kv(const char* op, const PagedKv& kv, const TensorView& q, const TensorView& out);
/// `out` and `lse` (optional) lie outside the caches.
void check_outside_caches(const Argument& argument, const TensorView& view, const PagedKv& kv);

}  // namespace fovea
