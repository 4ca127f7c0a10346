// Cases of the whole MLA layer: projections, norms, rotation, append, attention with context,
// o_proj.
#include <algorithm>

#include "cases/operands.h"
#include "cases/problems.h"
#include "cases/rules.h"
#include "fovea/mla.h"
#include "fovea/oracle.h"

namespace fovea::cases {
namespace {

constexpr double kTheta = 10000.0;
constexpr std::int64_t kMaxPosition = 8192;

/// Seeded weights whose scores spread as a trained model's do.
struct LayerWeights {
  MlaDims dims;
  Array q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b, o;

  LayerWeights(const CaseLine& line, const OpContext& ctx, Random& random) {
    dims = MlaDims{.hidden_size = line.integer("hidden", 64),
                   .num_heads = line.integer("heads", 4),
                   .q_lora_rank = line.integer("q_lora_rank", 0, {0}),
                   .kv_lora_rank = line.integer("kv_lora_rank", 32),
                   .qk_nope_head_dim = line.integer("nope", 16),
                   .qk_rope_head_dim = line.integer("rope", 8),
                   .v_head_dim = line.integer("v", 16)}
               .validated();
    OpContext on_host;  // Layers take their weights from there.
    on_host.pool = ctx.pool;
    // A projection to `out` features of rows with unit variance keeps them at `stddev`.
    const auto projection = [&](std::int64_t out, std::int64_t in, double stddev) {
      return normal_array(on_host, {line.dtype(), {out, in}}, random,
                          stddev / std::sqrt(static_cast<double>(in)));
    };
    const auto norm = [&](std::int64_t dim) {
      return normal_array(on_host, {line.dtype(), {dim}}, random, 1.0);
    };
    const std::int64_t q_in = dims.q_lora_rank > 0 ? dims.q_lora_rank : dims.hidden_size;
    if (dims.q_lora_rank > 0) {
      q_a = projection(dims.q_lora_rank, dims.hidden_size, 1.0);
      q_a_norm = norm(dims.q_lora_rank);
    }
    q_b = projection(dims.num_heads * dims.qk_head_dim(), q_in, 3.0);
    kv_a = projection(dims.latent_dim(), dims.hidden_size, 1.0);
    kv_a_norm = norm(dims.kv_lora_rank);
    kv_b = projection(dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank,
                      1.0);
    o = projection(dims.hidden_size, dims.num_heads * dims.v_head_dim, 1.0);
  }

  MlaWeights views() const {
    MlaWeights weights;
    weights.q_a_proj = q_a.view;
    weights.q_a_layernorm = q_a_norm.view;
    weights.q_b_proj = q_b.view;
    weights.kv_a_proj = kv_a.view;
    weights.kv_a_layernorm = kv_a_norm.view;
    weights.kv_b_proj = kv_b.view;
    weights.o_proj = o.view;
    return weights;
  }
  oracle::MlaWeights exact(bool interleaved) const {
    oracle::MlaWeights weights;
    weights.hidden_size = dims.hidden_size;
    weights.num_heads = dims.num_heads;
    weights.q_lora_rank = dims.q_lora_rank;
    weights.kv_lora_rank = dims.kv_lora_rank;
    weights.qk_nope_head_dim = dims.qk_nope_head_dim;
    weights.qk_rope_head_dim = dims.qk_rope_head_dim;
    weights.v_head_dim = dims.v_head_dim;
    weights.sm_scale = dims.sm_scale;
    if (dims.q_lora_rank > 0) {
      weights.q_a_proj = q_a.values();
      weights.q_a_layernorm = q_a_norm.values();
    }
    weights.q_b_proj = q_b.values();
    weights.kv_a_proj = kv_a.values();
    weights.kv_a_layernorm = kv_a_norm.values();
    weights.kv_b_proj = kv_b.values();
    weights.o_proj = o.values();
    weights.rotary = oracle::rotary(dims.qk_rope_head_dim, kTheta, interleaved);
    return weights;
  }
};

class MlaLayerProblem : public Problem {
 public:
  MlaLayerProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx),
        random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))),
        weights_(line, ctx, random_),
        is_interleaved_(line.word("pairing", "interleaved", {"neox", "interleaved"}) ==
                        "interleaved"),
        layer_(weights_.dims, weights_.views(), rotary(),
               {.absorption = line.word("absorption", "two_step", {"two_step", "full"}) == "full"
                                  ? MlaAbsorption::full
                                  : MlaAbsorption::two_step,
                .memory = ctx.memory}) {
    make_batch(line);
    context_lens_ = line.integers("context", {0}, {0, kMaxPosition / 2});
    context_lens_.resize(static_cast<std::size_t>(batch_.num_reqs()), context_lens_.back());
    std::vector<std::int64_t> lens;
    for (std::size_t i = 0; i < context_lens_.size(); ++i) {
      lens.push_back(context_lens_[i] + query_len(i));
    }
    batch_.seq_lens = to_int32(lens);
    sequences_ = make_cached_sequences(ctx, {{line.dtype(), weights_.dims.latent_dim()},
                                        line.integer("block_size", 16),
                                        line.integer("pad", 0, {0})},
                                       lens, random_);
    sequences_.fill(ctx, std::vector<std::int64_t>(lens.size(), 0), context_lens_, random_);
    for (std::size_t i = 0; i < lens.size(); ++i) {
      for (std::int64_t p = context_lens_[i]; p < lens[i]; ++p) {
        positions_.push_back(p);
        slots_.push_back(sequences_.slot(i, p));
      }
    }
    slot_mapping_ = index_array(ctx, slots_);
    position_rows_ = index_array(ctx, positions_);
    const auto tokens = static_cast<std::int64_t>(positions_.size());
    hidden_ = normal_array(ctx, {line.dtype(), {tokens, weights_.dims.hidden_size}}, random_);
    out_ = poisoned_array(ctx, {line.dtype(), {tokens, weights_.dims.hidden_size}});
    PlanOptions options;
    options.workspace_rows = line.integer("workspace_rows", 1024);
    options.block_size = sequences_.cache.block_size();
    options.context_plan = line.word("context_plan", "packed", {"packed", "equal"}) == "equal"
                               ? ContextPlanKind::equal
                               : ContextPlanKind::packed;
    plan_ = make_plan(batch_, ctx.plan_target, options);
    reserve_poisoned(ctx, layer_.workspace_bytes(ctx, plan_));
  }
  void run() override {
    AttentionStep step;
    step.plan = &plan_;
    step.block_table = sequences_.table();
    step.slot_mapping = slot_mapping_;
    step.positions = position_rows_;
    layer_(ctx_, hidden_.view, out_.view, step, sequences_.cache);
  }
  /// Projections of the new tokens, and attention as a decode does it.
  Work work() const override {
    const MlaDims& dims = weights_.dims;
    const std::int64_t weights = weights_.q_a.view.numel() + weights_.q_b.view.numel() +
                                 weights_.kv_a.view.numel() + weights_.kv_b.view.numel() +
                                 weights_.o.view.numel();
    Work work{.flops = 2.0 * static_cast<double>(weights) * static_cast<double>(positions_.size()),
              .bytes = static_cast<double>(bytes_of(layer_.dtype(), weights))};
    for (std::size_t i = 0; i < context_lens_.size(); ++i) {
      const std::int64_t keys = context_lens_[i] + query_len(i);
      work.flops += 2.0 * Rules{}.visible_pairs(0, query_len(i), keys) *
                    static_cast<double>(dims.num_heads * (dims.qk_head_dim() + dims.v_head_dim));
      work.bytes += static_cast<double>(keys * sequences_.cache.format().row_bytes());
    }
    return work;
  }
  CheckResult check() const override {
    const oracle::MlaWeights weights = weights_.exact(is_interleaved_);
    const std::vector<double> hidden = hidden_.values();
    const std::vector<double> out = out_.values();
    // Operands are rounded to the dtype six times between the hidden states and the output, each
    // time about as much as an attention kernel rounds its own: sqrt(6) of its limit.
    RowChecker checker(2.5 * attention_limit(layer_.dtype()));
    for (std::size_t i = 0; i < context_lens_.size(); ++i) {
      const std::int64_t begin = batch_.query_start_loc[i];
      const std::int64_t end = batch_.query_start_loc[i + 1];
      const auto rows_of = [&](const std::vector<double>& values) {
        return std::vector<double>(values.begin() + begin * weights.hidden_size,
                                   values.begin() + end * weights.hidden_size);
      };
      const std::vector<std::int64_t> positions(positions_.begin() + begin,
                                                positions_.begin() + end);
      const std::int64_t seq_len = batch_.seq_lens[i];
      checker.rows("stored latent of request " + std::to_string(i),
                   sequences_.rows(i, context_lens_[i], seq_len),
                   oracle::mla_latent_rows(weights, rows_of(hidden), positions),
                   weights_.dims.latent_dim());
      checker.rows("output of request " + std::to_string(i), rows_of(out),
                   oracle::mla_layer(weights, rows_of(hidden), positions,
                                     sequences_.rows(i, 0, seq_len), oracle::MlaForm::absorbed),
                   weights.hidden_size);
    }
    return checker.result();
  }

 private:
  /// Decodes first, as plans want it.
  void make_batch(const CaseLine& line) {
    std::vector<std::int64_t> query_lens = line.integers("q", {1}, {1, kMaxPosition / 2});
    std::stable_partition(query_lens.begin(), query_lens.end(),
                          [](std::int64_t len) { return len == 1; });
    batch_.query_start_loc = running_sum(query_lens);
    batch_.seq_lens.resize(query_lens.size());
  }
  std::int64_t query_len(std::size_t request) const {
    return batch_.query_start_loc[request + 1] - batch_.query_start_loc[request];
  }
  std::shared_ptr<const RotaryEmbedding> rotary() const {
    RopeConfig config;
    config.dim = weights_.dims.qk_rope_head_dim;
    config.theta = kTheta;
    config.max_position = kMaxPosition;
    config.pairing = is_interleaved_ ? RopePairing::interleaved : RopePairing::neox;
    return std::make_shared<RotaryEmbedding>(config, ctx_.memory);
  }

  const OpContext& ctx_;
  Random random_;
  LayerWeights weights_;
  bool is_interleaved_;
  MlaLayer layer_;
  SequenceBatch batch_;
  std::vector<std::int64_t> context_lens_;
  CachedSequences sequences_;
  std::vector<std::int64_t> positions_;
  std::vector<std::int64_t> slots_;
  Tensor slot_mapping_;
  Tensor position_rows_;
  Array hidden_;
  Array out_;
  BatchPlan plan_;
};

}  // namespace

ProblemPtr make_mla_layer(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<MlaLayerProblem>(line, ctx);
}

}  // namespace fovea::cases
