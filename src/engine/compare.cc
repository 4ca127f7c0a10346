// One layer step by three methods, taking turns in one run.
#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <vector>

#include "core/check.h"
#include "engine/expanded_attention.h"
#include "engine/kv_groups.h"
#include "engine/oracle_weights.h"
#include "fovea/engine.h"
#include "fovea/oracle.h"

namespace fovea {
namespace {

using engine::ExpandedAttention;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kSeed = 1;
constexpr std::int64_t kBlockSize = 16;
// Distinct tokens of the context, which repeats them: their latent rows cost a projection each.
constexpr std::int64_t kPeriod = 1024;
constexpr int kRounds = 9;
// A method whose turns took this long in all has had enough of them.
constexpr double kEnoughMs = 1000;

/// What comes from latent_cache on are latent caches in the formats of a Contest, one each.
enum Method : std::size_t { expanded_cache, expand_every_step, latent_cache };

/// The model's dtype, then what the latent dims have a format for.
std::vector<KvFormat> compared_formats(const Model& model) {
  const MlaDims& d = std::get<MlaLayer>(model.layer(0).attention).dims();
  std::vector<KvFormat> formats{
      latent_format(name_of(model.dtype()), d.kv_lora_rank, d.qk_rope_head_dim),
      latent_format("int8_per_token", d.kv_lora_rank, d.qk_rope_head_dim)};
  if (d.kv_lora_rank == 512 && d.qk_rope_head_dim == 64) {
    formats.push_back(latent_format("fp8_ds_mla", d.kv_lora_rank, d.qk_rope_head_dim));
  }
  if (d.kv_lora_rank % 2 == 0 && d.qk_rope_head_dim % 2 == 0) {
    formats.push_back(latent_format("int4_per_token", d.kv_lora_rank, d.qk_rope_head_dim));
  }
  return formats;
}

/// A layer with a request of `context` keys, the last of which is the new token's.
class Contest {
 public:
  Contest(const OpContext& ctx, const Model& model, std::int64_t context)
      : ctx_(ctx),
        model_(model),
        context_(context),
        expanded_(ctx, model, 0, context),
        outputs_(latent_cache) {
    for (const KvFormat& format : compared_formats(model)) {
      caches_.push_back(PagedKvCache::allocate(
          format,
          {.num_blocks = (context + kBlockSize - 1) / kBlockSize, .block_size = kBlockSize}));
      outputs_.emplace_back();
    }
    const DType dtype = model.dtype();
    const MlaDims& dims = std::get<MlaLayer>(model.layer(0).attention).dims();
    hidden_ = Tensor::empty(dtype, {1, dims.hidden_size});
    normed_ = Tensor::empty(dtype, {1, dims.hidden_size});
    rows_ = Tensor::empty(dtype, {context, dims.latent_dim()});
    for (Tensor& out : outputs_) out = Tensor::empty(dtype, {1, dims.hidden_size});
    block_table_.resize(static_cast<std::size_t>(caches_[0].num_blocks()));
    std::iota(block_table_.begin(), block_table_.end(), 0);
    token_hidden_state(kSeed, kPeriod, hidden_.view().select(0, 0));

    SequenceBatch batch;
    batch.query_start_loc = {0, 1};
    batch.seq_lens = {static_cast<std::int32_t>(context)};
    PlanOptions options;
    options.block_size = kBlockSize;
    plan_ = make_plan(batch, ctx.plan_target, options);
    ctx.workspace->reserve(
        std::max(expanded_.workspace_bytes(),
                 std::get<MlaLayer>(model.layer(0).attention).workspace_bytes(ctx, plan_)));
    fill();
  }

  std::size_t num_methods() const { return outputs_.size(); }
  std::string name(std::size_t method) const {
    if (method == expanded_cache) return "expanded_cache";
    if (method == expand_every_step) return "expand_every_step";
    return method == latent_cache ? "fovea" : "fovea, " + cache_of(method).format().name();
  }

  double run(std::size_t method) {
    const auto begin = Clock::now();
    rms_norm(ctx_, {.x = hidden_,
                    .weight = model_.layer(0).input_layernorm,
                    .out = normed_,
                    .eps = model_.config().rms_norm_eps});
    const TensorView out = outputs_[method];
    switch (method) {
      case expanded_cache:
        expanded_.step_with_expanded_cache(normed_, out);
        break;
      case expand_every_step:
        gather(context_ - 1);
        expanded_.step_expanding(normed_, rows_, out);
        break;
      default:
        std::get<MlaLayer>(model_.layer(0).attention)(ctx_, normed_, out, latent_step(),
                                                      cache_of(method));
        break;
    }
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }

  /// What expand_every_step just expanded becomes the expanded cache.
  void keep_expanded() { expanded_.keep_expanded(rows_); }

  std::int64_t cache_bytes(std::size_t method) const {
    if (method == expanded_cache) return expanded_.cache_bytes();
    if (method == expand_every_step) return rows_.nbytes();
    return context_ * cache_of(method).format().row_bytes();
  }

  /// The new token's output in float64, over the stored rows and its own.
  std::vector<double> expected() {
    gather(context_);
    const oracle::MlaWeights weights = engine::oracle_mla_weights(model_, 0);
    const std::vector<double> normed = oracle::rms_norm(
        engine::to_doubles(hidden_), engine::to_doubles(model_.input_layernorm(0)),
        model_.config().rms_norm_eps);
    return oracle::mla_layer(weights, normed, std::vector{context_ - 1}, engine::to_doubles(rows_),
                             oracle::MlaForm::absorbed);
  }

  double error(std::size_t method, const std::vector<double>& expected) const {
    return engine::relative_error(expected,
                                  engine::to_doubles(outputs_[method].view().select(0, 0)));
  }

 private:
  const PagedKvCache& cache_of(std::size_t method) const { return caches_[method - latent_cache]; }
  BlockTableView block_table() const {
    const std::int64_t width = caches_[0].num_blocks();
    return {block_table_.data(), 1, width, width};
  }

  AttentionStep latent_step() const {
    AttentionStep step;
    step.plan = &plan_;
    step.block_table = block_table();
    step.slot_mapping = TensorView::of(&new_position_, {1});  // Blocks lie in order.
    step.positions = TensorView::of(&new_position_, {1});
    return step;
  }

  /// The first `count` rows of the cache in the model's dtype into rows_.
  void gather(std::int64_t count) {
    const std::int32_t start = 0;
    const auto seq_len = static_cast<std::int32_t>(count);
    kv_gather(ctx_, {.cache = &caches_[0],
                     .block_table = block_table(),
                     .starts = std::span(&start, 1),
                     .seq_lens = std::span(&seq_len, 1),
                     .out = rows_.view().slice(0, 0, count)});
  }

  /// Latent rows of all tokens but the new one into the caches.
  void fill() {
    const MlaDims& dims = std::get<MlaLayer>(model_.layer(0).attention).dims();
    const std::int64_t distinct = std::min(kPeriod, context_);
    const Tensor hidden = Tensor::empty(model_.dtype(), {distinct, dims.hidden_size});
    const Tensor latent = Tensor::empty(model_.dtype(), {distinct, dims.latent_dim()});
    const Tensor rotated = Tensor::empty(model_.dtype(), {distinct, dims.latent_dim()});
    ctx_.pool->run(distinct, [&](std::int64_t token) {
      token_hidden_state(kSeed, token, hidden.view().select(0, token));
    });
    rms_norm(ctx_, {.x = hidden,
                    .weight = model_.layer(0).input_layernorm,
                    .out = hidden,
                    .eps = model_.config().rms_norm_eps});
    expanded_.latent_rows(hidden, {}, latent);
    std::vector<std::int64_t> positions(static_cast<std::size_t>(distinct));
    for (std::int64_t begin = 0; begin < context_ - 1; begin += distinct) {
      const std::int64_t count = std::min(distinct, context_ - 1 - begin);
      std::iota(positions.begin(), positions.end(), begin);
      const TensorView slots = TensorView::of(positions.data(), {count});
      const TensorView rows = rotated.view().slice(0, 0, count);
      copy(latent.view().slice(0, 0, count), rows);
      expanded_.rotate_keys(rows, slots);
      for (const PagedKvCache& cache : caches_) {
        kv_append(ctx_, {.kv_c = rows.slice(1, 0, dims.kv_lora_rank),
                         .k_pe = rows.slice(1, dims.kv_lora_rank, dims.latent_dim()),
                         .slot_mapping = slots,
                         .cache = &cache});
      }
    }
  }

  const OpContext& ctx_;
  const Model& model_;
  std::int64_t context_;
  std::int64_t new_position_ = context_ - 1;
  ExpandedAttention expanded_;
  std::vector<PagedKvCache> caches_;  ///< Of compared_formats.
  std::vector<std::int32_t> block_table_;
  BatchPlan plan_;
  Tensor hidden_;                ///< [1, H]
  Tensor normed_;                ///< [1, H]
  Tensor rows_;                  ///< [context, L + R], of expand_every_step.
  std::vector<Tensor> outputs_;  ///< [methods] of [1, H].
};

std::vector<CompareResult> compare_at(const OpContext& ctx, const Model& model,
                                      std::int64_t context) {
  const std::int64_t positions = engine::max_position(model);
  FOVEA_CHECK(context >= 1 && context <= positions, invalid_argument,
              "context is {}, must be from 1 to {}, the model's positions", context, positions);
  Contest contest(ctx, model, context);
  std::vector<std::vector<double>> step_ms(contest.num_methods());
  // Expanding comes first: its first turn leaves what the expanded cache holds.
  std::vector<std::size_t> turns_in_order(contest.num_methods());
  std::iota(turns_in_order.begin(), turns_in_order.end(), std::size_t{0});
  std::swap(turns_in_order[expanded_cache], turns_in_order[expand_every_step]);
  for (int round = 0; round < kRounds; ++round) {
    for (const std::size_t method : turns_in_order) {
      std::vector<double>& turns = step_ms[method];
      if (std::accumulate(turns.begin(), turns.end(), 0.0) > kEnoughMs) continue;
      turns.push_back(contest.run(method));
      if (round == 0 && method == expand_every_step) contest.keep_expanded();
    }
  }
  const std::vector<double> expected = contest.expected();
  std::vector<CompareResult> results;
  for (std::size_t method = 0; method < contest.num_methods(); ++method) {
    results.push_back({.method = contest.name(method),
                       .context = context,
                       .cache_bytes = contest.cache_bytes(method),
                       .step_ms = percentiles(step_ms[method]).p50,
                       .worst_error = contest.error(method, expected)});
  }
  return results;
}

}  // namespace

std::vector<CompareResult> compare_methods(const OpContext& ctx, const Model& model,
                                           std::span<const std::int64_t> contexts) {
  FOVEA_CHECK(model.config().is_mla(), unsupported,
              "{} has no latent cache that could be compared with expanded keys and values",
              model.config().model_type);
  std::vector<CompareResult> results;
  for (std::int64_t context : contexts) {
    for (CompareResult& result : compare_at(ctx, model, context)) {
      results.push_back(std::move(result));
    }
  }
  return results;
}

}  // namespace fovea
