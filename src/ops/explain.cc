#include <array>
#include <string>

#include "ops/dispatch.h"

namespace fovea {
namespace {

template <class Params>
void explain(const OpContext& ctx, const Op<Params>& op, const Params& params,
             std::vector<ImplementationChoice>& choices) {
  bool taken = false;
  for (const Backend* backend : ctx.backends) {
    for (const Implementation<Params>& implementation : backend->*op.implementations) {
      const char* declined = why_declined(implementation, params);
      std::string reason;
      if (declined) {
        reason = declined;
      } else if (taken) {
        reason = "one before it takes these operands";
      }
      taken = taken || !declined;
      choices.push_back({op.name, std::string(backend->name) + "/" + implementation.name, reason});
    }
  }
}

// Dims of DeepSeek-V2-Lite, the smallest of its family; with grouped queries, heads of 128 too.
constexpr std::int64_t kTokens = 1, kHeads = 16, kKvHeads = 2, kLatent = 512, kRopeDim = 64,
                       kNope = 128, kValue = 128;

}  // namespace

std::vector<ImplementationChoice> explain_implementations(const OpContext& ctx, DType dtype) {
  FOVEA_CHECK(is_compute_dtype(dtype), invalid_argument,
              "explain_implementations: dtype is {}; it must be f32, f16 or bf16", name_of(dtype));
  const auto make = [&](std::initializer_list<std::int64_t> shape) {
    return Tensor::zeros(dtype, shape);
  };
  const Tensor x = make({kTokens, kLatent}), weight = make({kLatent});
  const Tensor k_pe = make({kTokens, kRopeDim}), q_pe = make({kTokens, kHeads, kRopeDim});
  const Tensor q_latent = make({kTokens, kHeads, kLatent}),
               out_latent = make({kTokens, kHeads, kLatent});
  const Tensor q = make({kTokens, kHeads, kNope + kRopeDim}), k = make({kTokens, kHeads, kNope});
  const Tensor v = make({kTokens, kHeads, kValue}), out = make({kTokens, kHeads, kValue});
  const Tensor lse = Tensor::zeros(DType::f32, {kHeads, kTokens});
  const Tensor cos_sin = Tensor::zeros(DType::f32, {1, kRopeDim});
  const Tensor index = Tensor::zeros(DType::i32, {kTokens});
  const Tensor gathered = make({kTokens, kLatent + kRopeDim});
  const Tensor keys = make({kTokens, kKvHeads, kNope}), values = make({kTokens, kKvHeads, kValue});
  const Tensor queries = make({kTokens, kHeads, kNope});
  const KvCacheLayout layout{.num_blocks = 1, .block_size = 16};
  const PagedKvCache k_cache = PagedKvCache::allocate({dtype, kKvHeads * kNope}, layout);
  const PagedKvCache v_cache = PagedKvCache::allocate({dtype, kKvHeads * kValue}, layout);
  const PagedKvCache cache = PagedKvCache::allocate({dtype, kLatent + kRopeDim}, layout);
  const std::array<std::int32_t, 1> block{0}, start{0}, seq_len{1};
  const BlockTableView table{block.data(), 1, 1, 1};
  const std::array<std::int32_t, 2> offsets{0, 1};
  const PrefillSchedule prefill = schedule_prefill(offsets, offsets, 1);
  const DecodeSchedule decode = schedule_decode(offsets, seq_len, ctx.plan_target);

  std::vector<ImplementationChoice> choices;
  explain(ctx, kRmsNorm, {x, weight, x}, choices);
  const Tensor y = make({kTokens, kLatent});
  explain(ctx, kAddResidual, {x, y, 1.f}, choices);
  explain(ctx, kRope, {q_pe, {index, cos_sin, RopePairing::interleaved, {}}}, choices);
  explain(ctx, kKvAppend, {x, k_pe, index, &cache}, choices);
  explain(ctx, kGqaAppend, {keys, values, index, &k_cache, &v_cache, {}}, choices);
  explain(ctx, kKvGather, {&cache, table, start, seq_len, gathered}, choices);
  explain(ctx, kAttentionPrefill, {q, k, k_pe, v, out, lse, &prefill, {}, 1.f, {}, {}}, choices);
  explain(ctx, kAttentionDecode,
          {queries, {&k_cache, &v_cache, table, kKvHeads}, out, lse, &decode, {}, 1.f, {}},
          choices);
  const Tensor q_codes = Tensor::zeros(DType::f8e4m3fn, {kTokens, kHeads, kLatent + kRopeDim});
  explain(ctx, kQuantizeQuery, {q_latent, q_pe, q_codes, 1.f}, choices);
  explain(ctx, kMlaDecode,
          {q_latent, q_pe, &cache, table, out_latent, lse, &decode, {}, 1.f, {}, 0.f}, choices);
  explain(ctx, kMergeState, {{out, lse}, {out, lse}, {out, lse}, {}}, choices);
  const Tensor flat = make({kTokens, kHeads * kValue});
  const Tensor codes = Tensor::zeros(DType::f8e4m3fn, {kTokens, kHeads * kValue});
  explain(ctx, kQuantizeOutput, {flat, {codes, {}, 1.f, 0.f, false}}, choices);
  return choices;
}

}  // namespace fovea
