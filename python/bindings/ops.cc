#include <nanobind/stl/optional.h>

#include <cmath>

#include "arguments.h"
#include "bindings.h"
#include "runtime.h"
#include "variant.h"

namespace fovea::python {
namespace {

/// Lengths of a step without a plan.
struct Lengths {
  std::span<const std::int32_t> query_start_loc;
  std::span<const std::int32_t> seq_lens;
};

/// Without query_start_loc every request has an equal share of the `tokens`.
Lengths lengths_of(Arguments& arguments, nb::handle query_start_loc, nb::handle seq_lens,
                   std::int64_t tokens, std::vector<std::int32_t>& made) {
  Lengths lengths;
  lengths.seq_lens = arguments.integers(seq_lens, "seq_lens");
  if (!query_start_loc.is_none()) {
    lengths.query_start_loc = arguments.integers(query_start_loc, "query_start_loc");
    return lengths;
  }
  const auto requests = static_cast<std::int64_t>(lengths.seq_lens.size());
  if (requests == 0 ? tokens != 0 : tokens % requests != 0) {
    throw Error(ErrorCode::invalid_argument,
                "query_start_loc is None and " + std::to_string(tokens) +
                    " query tokens are no equal share for " + std::to_string(requests) +
                    " requests; say where each request's query tokens start");
  }
  for (std::int64_t i = 0; i <= requests; ++i) {
    made.push_back(static_cast<std::int32_t>(requests == 0 ? 0 : tokens / requests * i));
  }
  lengths.query_start_loc = made;
  return lengths;
}

/// Runs an op with its scratch from the runtime's workspace.
template <class Params>
void run_planned(const SharedRuntime& runtime, const Params& params,
                 void (*op)(const OpContext&, const Params&)) {
  runtime.run([&](const OpContext& ctx) {
    ctx.workspace->reserve(workspace_bytes(ctx, params));
    op(ctx, params);
  });
}

std::int64_t rows_of(const TensorView& view) { return view.ndim > 0 ? view.shape[0] : 0; }

float default_scale(std::optional<float> sm_scale, const TensorView& q) {
  if (sm_scale) return *sm_scale;
  const std::int64_t width = q.ndim == 3 ? q.shape[2] : 1;
  return 1.f / std::sqrt(static_cast<float>(width));
}

void mla_decode_call(nb::handle runtime_object, nb::handle q_latent, nb::handle q_pe,
                     nb::handle cache, nb::handle block_table, nb::handle query_start_loc,
                     nb::handle seq_lens, nb::handle plan_object, bool causal,
                     std::int64_t window_left, std::int64_t attention_chunk, float soft_cap,
                     float sm_scale, nb::handle sinks, float q_scale, nb::handle out,
                     nb::handle lse) {
  Arguments arguments(runtime_object);
  std::vector<std::int32_t> made;
  MlaDecodeParams params;
  params.q_latent = arguments.read(q_latent, "q_latent");
  params.q_pe = arguments.read(q_pe, "q_pe");
  params.cache = arguments.cache(cache, "cache", Access::read);
  params.block_table = arguments.block_table(block_table);
  params.out = arguments.write(out, "out");
  params.lse = arguments.write_optional(lse, "lse");
  const BatchPlan* plan = plan_of(plan_object);
  params.variant = variant_of(plan, variant(causal, window_left, attention_chunk, soft_cap));
  params.sm_scale = sm_scale;
  params.sinks = arguments.read_optional(sinks, "sinks");
  params.q_scale = q_scale;
  if (plan) {
    params.schedule = &plan->decode;
    run_planned(arguments.runtime(), params, &mla_decode);
    return;
  }
  const Lengths lengths =
      lengths_of(arguments, query_start_loc, seq_lens, rows_of(params.q_latent), made);
  arguments.runtime().run([&](const OpContext& ctx) {
    mla_decode_once(ctx, params, lengths.query_start_loc, lengths.seq_lens);
  });
}

void attention_decode_call(nb::handle runtime_object, nb::handle q, nb::handle k_cache,
                           nb::handle v_cache, nb::handle block_table, nb::handle query_start_loc,
                           nb::handle seq_lens, nb::handle plan_object, bool causal,
                           std::int64_t window_left, std::int64_t attention_chunk, float soft_cap,
                           std::optional<float> sm_scale, nb::handle sinks, nb::handle out,
                           nb::handle lse) {
  Arguments arguments(runtime_object);
  std::vector<std::int32_t> made;
  AttentionDecodeParams params;
  params.q = arguments.read(q, "q");
  params.kv.k_cache = arguments.cache(k_cache, "k_cache", Access::read);
  params.kv.v_cache = arguments.cache(v_cache, "v_cache", Access::read);
  params.kv.block_table = arguments.block_table(block_table);
  params.kv.num_kv_heads = params.kv.k_cache->format().num_heads;
  params.out = arguments.write(out, "out");
  params.lse = arguments.write_optional(lse, "lse");
  const BatchPlan* plan = plan_of(plan_object);
  params.variant = variant_of(plan, variant(causal, window_left, attention_chunk, soft_cap));
  params.sm_scale = default_scale(sm_scale, params.q);
  params.sinks = arguments.read_optional(sinks, "sinks");
  if (plan) {
    params.schedule = &plan->decode;
    run_planned(arguments.runtime(), params, &attention_decode);
    return;
  }
  const Lengths lengths =
      lengths_of(arguments, query_start_loc, seq_lens, rows_of(params.q), made);
  arguments.runtime().run([&](const OpContext& ctx) {
    attention_decode_once(ctx, params, lengths.query_start_loc, lengths.seq_lens);
  });
}

void attention_prefill_call(nb::handle runtime_object, nb::handle q, nb::handle k,
                            nb::handle k_pe, nb::handle v, nb::handle k_cache, nb::handle v_cache,
                            nb::handle block_table, nb::handle cu_seqlens_q,
                            nb::handle cu_seqlens_k, nb::handle plan_object, bool causal,
                            std::int64_t window_left, std::int64_t attention_chunk,
                            float soft_cap, std::optional<float> sm_scale, nb::handle sinks,
                            nb::handle out, nb::handle lse) {
  Arguments arguments(runtime_object);
  AttentionPrefillParams params;
  params.q = arguments.read(q, "q");
  params.k = arguments.read_optional(k, "k");
  params.k_pe = arguments.read_optional(k_pe, "k_pe");
  params.v = arguments.read_optional(v, "v");
  if (!k_cache.is_none()) {
    params.paged.k_cache = arguments.cache(k_cache, "k_cache", Access::read);
    params.paged.v_cache = arguments.cache(v_cache, "v_cache", Access::read);
    params.paged.block_table = arguments.block_table(block_table);
    params.paged.num_kv_heads = params.paged.k_cache->format().num_heads;
  }
  params.out = arguments.write(out, "out");
  params.lse = arguments.write_optional(lse, "lse");
  const BatchPlan* plan = plan_of(plan_object);
  params.variant = variant_of(plan, variant(causal, window_left, attention_chunk, soft_cap));
  params.sm_scale = default_scale(sm_scale, params.q);
  params.sinks = arguments.read_optional(sinks, "sinks");
  if (plan) {
    params.schedule = &plan->prefill;
    run_planned(arguments.runtime(), params, &attention_prefill);
    return;
  }
  const auto cu_q = arguments.integers(cu_seqlens_q, "cu_seqlens_q");
  const auto cu_k = arguments.integers(cu_seqlens_k, "cu_seqlens_k");
  arguments.runtime().run(
      [&](const OpContext& ctx) { attention_prefill_once(ctx, params, cu_q, cu_k); });
}

void merge_state_call(nb::handle runtime_object, nb::handle prefix_out, nb::handle prefix_lse,
                      nb::handle suffix_out, nb::handle suffix_lse, nb::handle sinks,
                      nb::handle out, nb::handle lse) {
  Arguments arguments(runtime_object);
  MergeStateParams params;
  params.prefix = {arguments.read(prefix_out, "prefix_out"),
                   arguments.read(prefix_lse, "prefix_lse")};
  params.suffix = {arguments.read(suffix_out, "suffix_out"),
                   arguments.read(suffix_lse, "suffix_lse")};
  params.result = {arguments.write(out, "out"), arguments.write_optional(lse, "lse")};
  params.sinks = arguments.read_optional(sinks, "sinks");
  arguments.runtime().run([&](const OpContext& ctx) { merge_state(ctx, params); });
}

void kv_append_call(nb::handle runtime_object, nb::handle kv_c, nb::handle k_pe,
                    nb::handle slot_mapping, nb::handle cache) {
  Arguments arguments(runtime_object);
  KvAppendParams params;
  params.kv_c = arguments.read(kv_c, "kv_c");
  params.k_pe = arguments.read(k_pe, "k_pe");
  params.slot_mapping = arguments.slots(slot_mapping);
  params.cache = arguments.cache(cache, "cache", Access::write);
  arguments.runtime().run([&](const OpContext& ctx) { kv_append(ctx, params); });
}

void gqa_append_call(nb::handle runtime_object, nb::handle k, nb::handle v,
                     nb::handle slot_mapping, nb::handle k_cache, nb::handle v_cache) {
  Arguments arguments(runtime_object);
  GqaAppendParams params;
  params.k = arguments.read(k, "k");
  params.v = arguments.read(v, "v");
  params.slot_mapping = arguments.slots(slot_mapping);
  params.k_cache = arguments.cache(k_cache, "k_cache", Access::write);
  params.v_cache = arguments.cache(v_cache, "v_cache", Access::write);
  arguments.runtime().run([&](const OpContext& ctx) { gqa_append(ctx, params); });
}

void kv_gather_call(nb::handle runtime_object, nb::handle cache, nb::handle block_table,
                    nb::handle starts, nb::handle seq_lens, nb::handle out) {
  Arguments arguments(runtime_object);
  KvGatherParams params;
  params.cache = arguments.cache(cache, "cache", Access::read);
  params.block_table = arguments.block_table(block_table);
  params.starts = arguments.integers(starts, "starts");
  params.seq_lens = arguments.integers(seq_lens, "seq_lens");
  params.out = arguments.write(out, "out");
  arguments.runtime().run([&](const OpContext& ctx) { kv_gather(ctx, params); });
}

}  // namespace

void bind_ops(nb::module_& m) {
  // fovea.ops has the names, the defaults and the documentation.
  bind_call(m, "mla_decode", &mla_decode_call);
  bind_call(m, "attention_decode", &attention_decode_call);
  bind_call(m, "attention_prefill", &attention_prefill_call);
  bind_call(m, "merge_state", &merge_state_call);
  bind_call(m, "kv_append", &kv_append_call);
  bind_call(m, "gqa_append", &gqa_append_call);
  bind_call(m, "kv_gather", &kv_gather_call);
}

}  // namespace fovea::python
