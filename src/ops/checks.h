// What several ops check. Every failure names the op, the argument, what it was and what it must
// be. Nothing here allocates unless it fails.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "fovea/ops.h"

namespace fovea {

/// An argument of an op, for error texts: "mla_decode: q_pe".
struct Argument {
  const char* op;
  const char* name;
};

/// An extent that a view must have, with its letter in the op's documentation.
struct Extent {
  static constexpr std::int64_t kAny = -1;
  const char* symbol;
  std::int64_t value = kAny;
};

/// What an op was given, for check_devices.
struct Operand {
  Operand(const char* name_in, const TensorView& view)
      : name(name_in), data(view.data), device(view.device) {}
  Operand(const char* name_in, const PagedKvCache* cache)
      : name(name_in),
        data(cache ? cache->row(0, 0) : nullptr),
        device(cache ? cache->device() : Device{}) {}
  const char* name;
  const void* data;
  Device device;
};

/// Operands are where ctx computes. Comes before checks that read values: those of other devices'
/// memory are not read.
void check_devices(const OpContext& ctx, const char* op, std::initializer_list<Operand> operands);
/// Whether the host may read the view's values.
inline bool is_on_host(const TensorView& view) { return view.device.type == Device::Type::cpu; }

/// Rank, extents, strides that int64 can address. Data may be null: see check_data.
void check_view(const Argument& argument, const TensorView& view,
                std::initializer_list<Extent> extents);
/// Elements are there. What workspace_bytes need not know, and an op must.
void check_data(const Argument& argument, const TensorView& view);
void check_compute_dtype(const Argument& argument, const TensorView& view);
void check_dtype(const Argument& argument, const TensorView& view, DType expected);
/// For outputs: `expected` or f32.
void check_dtype_or_f32(const Argument& argument, const TensorView& view, DType expected);
/// i32 or i64, of whatever holds positions or slots.
void check_index_dtype(const Argument& argument, const TensorView& view);
void check_unit_inner_stride(const Argument& argument, const TensorView& view);
/// Finite and positive: a default-constructed 0 means that it was forgotten.
void check_sm_scale(const char* op, float sm_scale);

/// As check_variant of a plan: what the rules can hold.
void check_variant(const char* op, const AttentionVariant& variant);
/// [N] f32.
void check_sinks(const Argument& argument, const TensorView& sinks, std::int64_t num_heads);

/// An output: elements are there, and no two are the same memory.
void check_output(const Argument& argument, const TensorView& view);
/// No element of output `a` is memory of `b`.
void check_disjoint(const Argument& a, const TensorView& view_a, const char* name_b,
                    const TensorView& view_b);

/// Present, with rows of `row_elements`, whose value is the sum that `what`
/// says.
void check_cache(const char* op, const PagedKvCache* cache, std::int64_t row_elements,
                 const char* what, const char* name = "cache");
/// As check_cache for rows [kv_c | k_pe] of L + R: one head, and with scales per token the latent
/// is the first group.
void check_latent_cache(const char* op, const PagedKvCache* cache, std::int64_t latent,
                        std::int64_t rope_dim);
/// As check_cache for rows of `num_heads` heads.
void check_heads_cache(const char* op, const PagedKvCache* cache, std::int64_t num_heads,
                       std::int64_t head_dim, const char* what, const char* name);
/// The rows of a cache as a view of bytes.
TensorView bytes_of_rows(const PagedKvCache& cache);

/// Every slot is -1 or in [0, num_slots); of slots on the host.
void check_slots(const char* op, const TensorView& slot_mapping, std::int64_t num_slots);

/// Request `request` reads its first `num_keys` rows: the table is wide enough and every block id
/// that holds rows [first_key, num_keys) is a block of the cache.
void check_block_row(const char* op, const BlockTableView& table, const PagedKvCache& cache,
                     std::int64_t request, std::int64_t first_key, std::int64_t num_keys);
/// The table has `requests` rows and memory behind them.
/// `on_device`: it must be in a GPU's memory, else on the host.
void check_block_table(const char* op, const BlockTableView& table, std::int64_t requests,
                       bool on_device = false);

/// `offsets` is [0, ..., last], does not decrease and ends at `limit` or before it.
void check_offsets(const Argument& argument, std::span<const std::int32_t> offsets,
                   std::int64_t limit, const char* limit_name);

}  // namespace fovea
