// Which implementation runs.
#pragma once

#include <string>

#include "core/check.h"
#include "core/kernel_time.h"
#include "ops/backend.h"

namespace fovea {

/// An op: its name, and where each backend lists its implementations.
template <class Params>
struct Op {
  const char* name;
  std::span<const Implementation<Params>> Backend::*implementations;
};

inline constexpr Op<RmsNormParams> kRmsNorm{"rms_norm", &Backend::rms_norm};
inline constexpr Op<AddResidualParams> kAddResidual{"add_residual", &Backend::add_residual};
inline constexpr Op<RopeParams> kRope{"rope", &Backend::rope};
inline constexpr Op<KvAppendParams> kKvAppend{"kv_append", &Backend::kv_append};
inline constexpr Op<GqaAppendParams> kGqaAppend{"gqa_append", &Backend::gqa_append};
inline constexpr Op<KvGatherParams> kKvGather{"kv_gather", &Backend::kv_gather};
inline constexpr Op<AttentionPrefillParams> kAttentionPrefill{"attention_prefill",
                                                              &Backend::attention_prefill};
inline constexpr Op<AttentionDecodeParams> kAttentionDecode{"attention_decode",
                                                            &Backend::attention_decode};
inline constexpr Op<QuantizeQueryParams> kQuantizeQuery{"quantize_query", &Backend::quantize_query};
inline constexpr Op<MlaDecodeParams> kMlaDecode{"mla_decode", &Backend::mla_decode};
inline constexpr Op<MergeStateParams> kMergeState{"merge_state", &Backend::merge_state};
inline constexpr Op<QuantizeOutputParams> kQuantizeOutput{"quantize_output",
                                                          &Backend::quantize_output};

template <class Params>
const char* why_declined(const Implementation<Params>& implementation, const Params& params) {
  if constexpr (requires { params.schedule->device_seq_lens; }) {
    const bool on_device = params.schedule->device_seq_lens != nullptr;
    if (on_device && !implementation.prepare) return "lengths in device memory are not taken";
  }
  return implementation.declines ? implementation.declines(params) : nullptr;
}

/// The first implementation, backend by backend, that takes `params`. Throws Error(unsupported)
/// with the reason of each when there is none.
template <class Params>
const Implementation<Params>& select(const OpContext& ctx, const Op<Params>& op,
                                     const Params& params) {
  FOVEA_CHECK(!ctx.backends.empty() && ctx.pool != nullptr, invalid_argument,
              "{}: ctx has {} backends and {} thread pool; it must be a Runtime's context", op.name,
              ctx.backends.size(), ctx.pool ? "a" : "no");
  for (const Backend* backend : ctx.backends) {
    for (const Implementation<Params>& implementation : backend->*op.implementations) {
      if (!why_declined(implementation, params)) return implementation;
    }
  }
  std::string reasons;
  for (const Backend* backend : ctx.backends) {
    for (const Implementation<Params>& implementation : backend->*op.implementations) {
      reasons += std::string("; ") + backend->name + "/" + implementation.name + ": " +
                 why_declined(implementation, params);
    }
  }
  fail(ErrorCode::unsupported, "{}: no implementation takes these operands{}", op.name,
       reasons.empty() ? "; there is none" : reasons);
}

/// Rows past the schedule's last. No call without rows.
inline void write_padding_rows(const OpContext& ctx, std::int64_t num_actual, const TensorView& out,
                               const TensorView& lse) {
  if (num_actual < out.shape[0]) {
    ctx.backends.front()->write_padding_rows(ctx, num_actual, out, lse);
  }
}

/// Whether run() finds its scratch in params.prepared.
template <class Params>
bool is_prepared(const Implementation<Params>& implementation, const Params& params) {
  if constexpr (requires { params.prepared; }) {
    return implementation.prepare != nullptr && params.prepared;
  } else {
    return false;
  }
}

template <class Params>
std::int64_t scratch_bytes(const OpContext& ctx, const Implementation<Params>& implementation,
                           const Params& params) {
  return implementation.workspace_bytes ? implementation.workspace_bytes(ctx, params) : 0;
}

/// Fills params.prepared, which is `op`'s scratch.
template <class Params>
void prepare_with(const OpContext& ctx, const Op<Params>& op, const Params& params) {
  const Implementation<Params>& implementation = select(ctx, op, params);
  if (implementation.prepare == nullptr) return;
  const std::int64_t needed = scratch_bytes(ctx, implementation, params);
  FOVEA_CHECK(params.prepared && params.prepared.dtype == DType::u8 && params.prepared.ndim == 1 &&
                  params.prepared.is_contiguous() && params.prepared.shape[0] >= needed &&
                  params.prepared.device == ctx.memory.device,
              invalid_argument, "{}: prepared is {} on {}; it must be u8[{}] on {}", op.name,
              to_string(params.prepared), to_string(params.prepared.device), needed,
              to_string(ctx.memory.device));
  const auto behind = reinterpret_cast<std::uintptr_t>(params.prepared.data) %
                      static_cast<std::uintptr_t>(Workspace::kAlignment);
  FOVEA_CHECK(behind == 0, invalid_argument,
              "{}: prepared begins {} bytes behind a multiple of {}; it must begin at one", op.name,
              behind, Workspace::kAlignment);
  implementation.prepare(ctx, params, static_cast<std::byte*>(params.prepared.data));
}

/// Selects, and makes sure before anything is written that its scratch fits.
template <class Params>
const Implementation<Params>& select_with_scratch(const OpContext& ctx, const Op<Params>& op,
                                                  const Params& params) {
  const Implementation<Params>& implementation = select(ctx, op, params);
  if (is_prepared(implementation, params)) return implementation;
  const std::int64_t needed = scratch_bytes(ctx, implementation, params);
  if (needed == 0) return implementation;
  const std::int64_t free = ctx.workspace ? ctx.workspace->capacity() - ctx.workspace->used() : 0;
  FOVEA_CHECK(
      needed <= free, resource_exhausted,
      "{}: workspace has {} bytes free; {}/{} needs {} (reserve workspace_bytes(ctx, params))",
      op.name, free, op.name, implementation.name, needed);
  return implementation;
}

template <class Params>
void run(const OpContext& ctx, const Implementation<Params>& implementation,
         const Params& params) {
  const KernelTimer timer;
  implementation.run(ctx, params);
}

}  // namespace fovea
