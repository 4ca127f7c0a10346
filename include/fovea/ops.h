// The ops: one params struct each, validated once, run by the first backend that takes it.
//
// Names of extents: T tokens, N heads, L = kv_lora_rank, R = qk_rope_head_dim, P =
// qk_nope_head_dim, V = v_head_dim. "Compute dtype" is f32, f16 or bf16. Accumulation is float32 or
// wider. Views may have any strides unless said otherwise. Integer arrays that the host plans with
// are spans of host memory.
//
// Every op throws Error(invalid_argument) before it writes anything when operands do not fit each
// other, and Error(unsupported) with each implementation's reason when none takes them. Scratch
// comes from ctx.workspace: reserve workspace_bytes(ctx, params) of it first. An op without scratch
// has no such function. workspace_bytes reads shapes, dtypes and the schedule only: required views
// may still have no data (an optional view without data is an absent one).
//
// Outputs share no memory with inputs, unless said otherwise. Rows of `out` and `lse` past the
// schedule's last come out as zeros and -inf.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "fovea/op_context.h"
#include "fovea/paged_kv_cache.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight. `out` may be `x`.
struct RmsNormParams {
  TensorView x;       ///< [T, D] compute dtype, unit innermost stride.
  TensorView weight;  ///< [D] compute dtype.
  TensorView out;     ///< [T, D] dtype of x, unit innermost stride.
  float eps = 1e-6f;
};
void rms_norm(const OpContext& ctx, const RmsNormParams& params);

/// x[t] += scale * y[t], rounded once: a layer's output joins the residual stream.
struct AddResidualParams {
  TensorView x;  ///< [T, D] compute dtype, unit innermost stride; read and written.
  TensorView y;  ///< [T, D] dtype of x, unit innermost stride.
  float scale = 1.f;
};
void add_residual(const OpContext& ctx, const AddResidualParams& params);

enum class RopePairing : std::uint8_t {
  neox,         ///< Channel i turns with channel i + R / 2.
  interleaved,  ///< Channel 2 i turns with channel 2 i + 1.
};

/// How the channel pairs of a multi-axis rotation (time, height, width) share the axes.
struct MropeSections {
  std::array<std::int64_t, 3> pairs{};  ///< Of each axis; they add up to R / 2. All 0: one axis.
  /// Pair i turns by axis i % 3 while that axis has pairs left (i < 3 * pairs[i % 3]), else by axis
  /// 0. False: the first pairs[0] pairs turn by axis 0, the next pairs[1] by axis 1, and so on.
  bool interleaved = false;
  bool multi_axis() const { return pairs[0] + pairs[1] + pairs[2] > 0; }
  bool operator==(const MropeSections&) const = default;
};

/// The angles of each token.
struct RopeAngles {
  TensorView positions;  ///< [T] or [1, T], or [3, T] with sections; i32 or i64, each in
                         ///< [0, max_position).
  TensorView cos_sin;    ///< [max_position, R] f32: R / 2 cosines, then R / 2 sines, contiguous.
  RopePairing pairing = RopePairing::neox;
  MropeSections sections;
};

/// Turns x in place. Channels beyond the first R of a head are no part of x: pass a slice.
struct RopeParams {
  TensorView x;  ///< [T, N, R] compute dtype, R even; any strides.
  RopeAngles angles;
};
void rope(const OpContext& ctx, const RopeParams& params);

/// Stores row [kv_c[t] | k_pe[t]] in slot slot_mapping[t]; -1 skips a token. No other slot may
/// occur twice. With `norm_weight` kv_c is normed on the way and with `rope.cos_sin` k_pe turns,
/// rounded as the ops rms_norm and rope round them; both stay as they are.
struct KvAppendParams {
  TensorView kv_c;                      ///< [T, L] compute dtype.
  TensorView k_pe;                      ///< [T, R] dtype of kv_c.
  TensorView slot_mapping;              ///< [T] i32 or i64.
  const PagedKvCache* cache = nullptr;  ///< Rows of L + R.
  TensorView norm_weight = {};          ///< Optional, [L] compute dtype.
  float norm_eps = 1e-6f;
  RopeAngles rope = {};  ///< Optional, of all R channels.
};
void kv_append(const OpContext& ctx, const KvAppendParams& params);

/// Stores keys k[t] and values v[t] of all heads in slot slot_mapping[t] of their caches; -1 skips
/// a token. No other slot may occur twice. With `rope.cos_sin` the first R channels of each key
/// turn on the way, rounded as the op rope rounds them; k itself stays as it is.
struct GqaAppendParams {
  TensorView k;                           ///< [T, Hk, Dk] compute dtype.
  TensorView v;                           ///< [T, Hk, Dv] dtype of k.
  TensorView slot_mapping;                ///< [T] i32 or i64.
  const PagedKvCache* k_cache = nullptr;  ///< Rows of Hk * Dk, head by head.
  const PagedKvCache* v_cache = nullptr;  ///< Rows of Hk * Dv; as many slots as k_cache.
  RopeAngles rope;                        ///< Optional.
};
void gqa_append(const OpContext& ctx, const GqaAppendParams& params);

/// Block ids of each request, host memory. Entries are read only where a request's length needs
/// them.
struct BlockTableView {
  const std::int32_t* data = nullptr;  ///< [requests, width]
  std::int64_t requests = 0;
  std::int64_t width = 0;
  std::int64_t stride = 0;  ///< Elements from a request to the next.
  Device device = {};       ///< Of `data`. A GPU's is for decodes with device_seq_lens.
};

/// Copies seq_lens[i] rows of request i, from position starts[i] on, one request after the other.
struct KvGatherParams {
  const PagedKvCache* cache = nullptr;
  BlockTableView block_table;
  std::span<const std::int32_t> starts;    ///< [requests] any position, not only block borders.
  std::span<const std::int32_t> seq_lens;  ///< [requests]
  /// [sum(seq_lens), row_elements] compute dtype, or [sum(seq_lens), row_bytes] u8: the stored
  /// bytes. Unit innermost stride.
  TensorView out;
};
void kv_gather(const OpContext& ctx, const KvGatherParams& params);

/// Keys and values of all heads in blocks, under one block table.
struct PagedKv {
  const PagedKvCache* k_cache = nullptr;  ///< Rows of Hk * Dk, in any format for heads.
  const PagedKvCache* v_cache = nullptr;  ///< Rows of Hk * Dv; blocks as in k_cache.
  BlockTableView block_table;             ///< Rows of the schedule's requests are read.
  std::int64_t num_kv_heads = 0;          ///< Hk
};

/// Ragged attention of N query heads over Hk key heads (N a multiple of Hk), K and V of different
/// widths. Keys and values are k (with or without k_pe) and v; or those of `paged`; or, with both,
/// those of the query tokens, which end their sequences, are rows of k and v [Tq, Hk, D], and those
/// before them are paged. A query row without keys gives out 0, lse -inf.
struct AttentionPrefillParams {
  TensorView q;     ///< [Tq, N, Dk] compute dtype.
  TensorView k;     ///< [Tk, Hk, Dk - R] dtype of q.
  TensorView k_pe;  ///< Optional [Tk, R] dtype of q: the last R channels of every key head.
  TensorView v;     ///< [Tk, Hk, Dv] dtype of q.
  TensorView out;   ///< [Tq, N, Dv] dtype of q or f32.
  TensorView lse;   ///< Optional [N, Tq] f32, natural log.
  const PrefillSchedule* schedule = nullptr;
  AttentionVariant variant;
  float sm_scale = 0.f;
  PagedKv paged;     ///< Instead of k and v, or of the context before them.
  TensorView sinks;  ///< Optional [N] f32: raw logits that join the denominator, not the lse.
};
void attention_prefill(const OpContext& ctx, const AttentionPrefillParams& params);
std::int64_t workspace_bytes(const OpContext& ctx, const AttentionPrefillParams& params);
/// Plans, makes room in the workspace, of which nothing may be taken, and runs in one call, which
/// allocates; params.schedule is not read. For steps of many layers plan once and pass the
/// schedule.
void attention_prefill_once(const OpContext& ctx, const AttentionPrefillParams& params,
                            std::span<const std::int32_t> cu_seqlens_q,
                            std::span<const std::int32_t> cu_seqlens_k);

/// Absorbed MLA decode: every head of a request attends to the same latent rows [kv_c | k_pe],
/// whose first L channels are the values too. Query tokens stand at the end of their sequence.
struct MlaDecodeParams {
  TensorView q_latent;  ///< [T, N, L] compute dtype, or f8e4m3fn: q_nope through W_UK.
  TensorView q_pe;      ///< [T, N, R] dtype of q_latent; q[..., L:] of a concatenated query.
  const PagedKvCache* cache = nullptr;  ///< Rows of L + R in any format.
  BlockTableView block_table;           ///< First schedule->seq_lens.size() rows are read.
  TensorView out;                       ///< [T, N, L] dtype of q_latent or f32; any compute dtype
                                        ///< with f8e4m3fn queries.
  TensorView lse;                       ///< Optional [N, T] f32, natural log.
  const DecodeSchedule* schedule = nullptr;
  AttentionVariant variant;
  float sm_scale = 0.f;
  TensorView sinks;     ///< Optional [N] f32: raw logits that join the denominator, not the lse.
  float q_scale = 0.f;  ///< With f8e4m3fn queries: multiplies their stored values.
  /// Optional u8 [workspace_bytes of these params without it], aligned as Workspace aligns:
  /// prepare() has filled it.
  TensorView prepared = {};
};
void mla_decode(const OpContext& ctx, const MlaDecodeParams& params);
std::int64_t workspace_bytes(const OpContext& ctx, const MlaDecodeParams& params);
/// Brings what kernels need of the schedule to where they run, once for all calls with the same
/// schedule, block table, shapes and variant, one at a time: those of a step's layers. Where
/// nothing needs that (on the CPU), `prepared` is neither written nor read. In a CUDA graph whose
/// schedule has device_seq_lens it plans anew in every launch.
void prepare(const OpContext& ctx, const MlaDecodeParams& params);
/// Plans, makes room in the workspace, of which nothing may be taken, and runs in one call, which
/// allocates; params.schedule is not read. For steps of many layers plan once and pass the
/// schedule.
void mla_decode_once(const OpContext& ctx, const MlaDecodeParams& params,
                     std::span<const std::int32_t> query_start_loc,
                     std::span<const std::int32_t> seq_lens);

/// Concatenated queries of mla_decode as f8e4m3fn under one scale: out = [q_latent | q_pe] / scale,
/// rounded to nearest even and saturated.
struct QuantizeQueryParams {
  TensorView q_latent;  ///< [T, N, L] compute dtype.
  TensorView q_pe;      ///< [T, N, R] dtype of q_latent.
  TensorView out;       ///< [T, N, L + R] f8e4m3fn, unit innermost stride.
  float scale = 0.f;
};
void quantize_query(const OpContext& ctx, const QuantizeQueryParams& params);

/// Paged attention of N query heads over Hk key heads, split over keys: query head n reads key head
/// n / (N / Hk). Query tokens, any number per request, stand at the end of their sequence.
struct AttentionDecodeParams {
  TensorView q;    ///< [T, N, Dk] compute dtype.
  PagedKv kv;      ///< Rows of the block table are those of schedule->seq_lens.
  TensorView out;  ///< [T, N, Dv] dtype of q or f32.
  TensorView lse;  ///< Optional [N, T] f32, natural log.
  const DecodeSchedule* schedule = nullptr;
  AttentionVariant variant;
  float sm_scale = 0.f;
  TensorView sinks;  ///< Optional [N] f32: raw logits that join the denominator, not the lse.
  TensorView prepared = {};  ///< As in MlaDecodeParams.
};
void attention_decode(const OpContext& ctx, const AttentionDecodeParams& params);
std::int64_t workspace_bytes(const OpContext& ctx, const AttentionDecodeParams& params);
void prepare(const OpContext& ctx, const AttentionDecodeParams& params);
/// Plans, makes room in the workspace, of which nothing may be taken, and runs in one call, which
/// allocates; params.schedule is not read. For steps of many layers plan once and pass the
/// schedule.
void attention_decode_once(const OpContext& ctx, const AttentionDecodeParams& params,
                           std::span<const std::int32_t> query_start_loc,
                           std::span<const std::int32_t> seq_lens);

/// A partial attention result.
struct AttentionState {
  TensorView out;  ///< [T, N, D] compute dtype, each state its own.
  TensorView lse;  ///< [N, T] f32, natural log; (0, -inf) is empty. +inf is taken as empty.
};

/// result = the attention over both parts' keys. An empty part carries no weight, whatever its
/// `out` holds; merging with an empty part copies the other bit for bit (converts, where dtypes
/// differ). The result's views may be those of either input.
struct MergeStateParams {
  AttentionState prefix;
  AttentionState suffix;
  AttentionState result;  ///< lse optional.
  /// Optional [N] f32, at the last merge only: raw logits that join the denominator, not the lse.
  TensorView sinks;
};
void merge_state(const OpContext& ctx, const MergeStateParams& params);

/// How attention's output is quantised. Found from a QuantizedOutput alone, see output_quant_of.
enum class OutputQuant : std::uint8_t {
  fp8_per_tensor,  ///< out f8e4m3fn, a scale, no block_scale.
  fp8_per_group,   ///< out f8e4m3fn, no scale, block_scale with D / 128 or D / 64 groups.
  nvfp4,           ///< out u8 (two f4e2m1 codes), a scale, block_scale f8e4m3fn of groups of 16.
};

/// Where a quantised output goes. `scale` multiplies stored values, `inv_scale` is its inverse (the
/// convention of TensorRT-LLM, and of the global scale of nvfp4): at most one is given.
struct QuantizedOutput {
  TensorView out;  ///< [T, D] f8e4m3fn; [T, D / 2] u8 for nvfp4. Unit innermost stride.
  /// fp8_per_group: [T, groups], f32 or f8e8m0, any strides: column-major, or padded for TMA as
  /// tma_aligned_strides says. nvfp4: f8e4m3fn, [T up to a multiple of 128, D / 16 up to a multiple
  /// of 4], contiguous, in tiles of 128 x 4 as tensor cores read them: row r, group g of a tile
  /// lies at byte (r % 32) * 16 + r / 32 * 4 + g; what belongs to no row or group is zero.
  TensorView block_scale;
  float scale = 0.f;
  float inv_scale = 0.f;
  /// fp8_per_group: scales are rounded up to powers of two. f8e8m0 needs it.
  bool power_of_two_scales = false;
};

/// Throws Error(invalid_argument) that names what does not fit `output_dim` = D or each other.
OutputQuant output_quant_of(const QuantizedOutput& output, std::int64_t output_dim);

/// Strides of block_scale [T, groups]: column-major, each column a multiple of 16 bytes.
std::array<std::int64_t, 2> tma_aligned_strides(std::int64_t tokens, DType dtype);

/// output.out = x over its scales, rounded to nearest even and saturated. Rows behind those of x
/// come out as zeros with scales of zero.
struct QuantizeOutputParams {
  TensorView x;  ///< [at most T, D] compute dtype, unit innermost stride.
  QuantizedOutput output;
};
void quantize_output(const OpContext& ctx, const QuantizeOutputParams& params);

/// Every implementation of every op in order, and why one would be declined for `dtype`.
std::vector<ImplementationChoice> explain_implementations(const OpContext& ctx, DType dtype);

}  // namespace fovea
