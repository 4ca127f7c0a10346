// Mistakes that an attention engine can make and still give smooth, plausible numbers: each must
// make verification fail.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine/serving.h"
#include "fovea/block_pool.h"

namespace fovea {
namespace {

enum class Fault { none, sm_scale, rope_pairing, lost_last_token, swapped_keys_and_values };

/// Of the rows of a step.
std::vector<std::int64_t> slots_of(const LayerTrace& trace) {
  std::vector<std::int64_t> slots;
  const std::int64_t block_size = trace.cache->block_size();
  for (std::size_t i = 0; i < trace.request_of.size(); ++i) {
    const std::int32_t* blocks =
        trace.block_table.data + static_cast<std::int64_t>(i) * trace.block_table.stride;
    for (std::int32_t row = trace.query_start_loc[i]; row < trace.query_start_loc[i + 1]; ++row) {
      const std::int64_t position = trace.positions[static_cast<std::size_t>(row)];
      slots.push_back(blocks[position / block_size] * block_size + position % block_size);
    }
  }
  return slots;
}

/// A step of a layer once more, with another layer or plan: its rows go into the cache and its
/// outputs to whoever looks next.
template <class Layer, class Cache>
void run_again(const OpContext& ctx, const Model& model, const LayerTrace& trace,
               const BatchPlan& plan, const Layer& layer, const Cache& cache) {
  const Tensor normed =
      Tensor::empty(trace.input.dtype, {trace.input.shape[0], trace.input.shape[1]});
  rms_norm(ctx, {.x = trace.input,
                 .weight = model.layer(trace.layer).input_layernorm,
                 .out = normed,
                 .eps = model.config().rms_norm_eps});
  const std::vector<std::int64_t> slots = slots_of(trace);
  AttentionStep step;
  step.plan = &plan;
  step.block_table = trace.block_table;
  step.slot_mapping = TensorView::of(slots.data(), {std::ssize(slots)});
  step.positions = TensorView::of(trace.positions.data(), {std::ssize(trace.positions)});
  ctx.workspace->reserve(layer.workspace_bytes(ctx, plan));
  layer(ctx, normed, trace.output, step, cache);
}

/// Puts a layer with one fault in the place of the model's.
class FaultyLayers : public StepObserver {
 public:
  FaultyLayers(const OpContext& ctx, const Model& model, Fault fault)
      : ctx_(ctx), model_(model), fault_(fault) {
    for (std::int64_t i = 0; i < model.num_layers(); ++i) layers_.push_back(make_layer(i));
  }

  void on_layer(const LayerTrace& trace) override {
    const BatchPlan plan = make_step_plan(trace);
    run_again(ctx_, model_, trace, plan, layers_[static_cast<std::size_t>(trace.layer)],
              *trace.cache);
  }

 private:
  MlaLayer make_layer(std::int64_t index) {
    MlaDims dims = std::get<MlaLayer>(model_.layer(index).attention).dims();
    MlaWeights weights = model_.mla_weights(index);
    RopeConfig rope = model_.config().groups[0].rope;
    if (fault_ == Fault::sm_scale) {
      // The scale of an absorbed query's width in place of the head's.
      dims.sm_scale *=
          std::sqrt(static_cast<float>(dims.qk_head_dim()) / static_cast<float>(dims.latent_dim()));
    }
    if (fault_ == Fault::rope_pairing) {
      rope.pairing =
          rope.pairing == RopePairing::neox ? RopePairing::interleaved : RopePairing::neox;
    }
    if (fault_ == Fault::swapped_keys_and_values) swap_keys_and_values(dims, weights);
    return MlaLayer(dims, weights, std::make_shared<RotaryEmbedding>(rope),
                    {.rms_norm_eps = model_.config().latent_norm_eps});
  }

  /// Per head the first V columns are taken as values and the next P as keys.
  void swap_keys_and_values(const MlaDims& dims, MlaWeights& weights) {
    const std::int64_t P = dims.qk_nope_head_dim, V = dims.v_head_dim, L = dims.kv_lora_rank;
    Tensor swapped = Tensor::empty(weights.kv_b_proj.dtype, {dims.num_heads * (P + V), L});
    const TensorView from = weights.kv_b_proj.split(0, dims.num_heads, P + V);
    const TensorView to = swapped.view().split(0, dims.num_heads, P + V);
    copy(from.slice(1, V, P + V), to.slice(1, 0, P));
    copy(from.slice(1, 0, V), to.slice(1, P, P + V));
    weights.kv_b_proj = swapped;
    memory_.push_back(std::move(swapped));
  }

  BatchPlan make_step_plan(const LayerTrace& trace) const {
    if (fault_ != Fault::lost_last_token) return *trace.plan;
    SequenceBatch batch;
    batch.query_start_loc.assign(trace.query_start_loc.begin(), trace.query_start_loc.end());
    batch.seq_lens.assign(trace.seq_lens.begin(), trace.seq_lens.end());
    for (std::size_t i = 0; i < batch.seq_lens.size(); ++i) {
      const std::int32_t query_len = batch.query_start_loc[i + 1] - batch.query_start_loc[i];
      if (batch.seq_lens[i] > query_len) --batch.seq_lens[i];
    }
    PlanOptions options;
    options.block_size = trace.cache->block_size();
    return make_plan(batch, ctx_.plan_target, options);
  }

  const OpContext& ctx_;
  const Model& model_;
  Fault fault_;
  std::vector<Tensor> memory_;
  std::vector<MlaLayer> layers_;
};

enum class GqaFault {
  none,
  narrow_window,  ///< One key less.
  wide_window,    ///< One key more.
  lost_sinks,
  sinks_twice,
  lost_soft_cap,
  lost_bias,
  swapped_kv_heads,
  rope_pairing,
  other_groups_rope,
  lost_q_norm,
  lost_post_scale,  ///< The scale of head_dim in place of the config's.
};

/// The same for layers of grouped-query attention.
class FaultyGqaLayers : public StepObserver {
 public:
  FaultyGqaLayers(const OpContext& ctx, const Model& model, GqaFault fault)
      : ctx_(ctx), model_(model), fault_(fault) {
    for (std::int64_t i = 0; i < model.num_layers(); ++i) layers_.push_back(make_layer(i));
  }

  void on_layer(const LayerTrace& trace) override {
    SequenceBatch batch;
    batch.query_start_loc.assign(trace.query_start_loc.begin(), trace.query_start_loc.end());
    batch.seq_lens.assign(trace.seq_lens.begin(), trace.seq_lens.end());
    PlanOptions options;
    options.context_plan = ContextPlanKind::paged;
    options.block_size = trace.cache->block_size();
    options.variant = variant_of(trace.plan->variant);
    const BatchPlan plan = make_plan(batch, ctx_.plan_target, options);
    const AttentionLayer& layer = layers_[static_cast<std::size_t>(trace.layer)];
    run_again(ctx_, model_, trace, plan, layer,
              GqaCache::columns_of(*trace.cache, layer.dims()));
  }

 private:
  AttentionVariant variant_of(AttentionVariant variant) const {
    if (variant.window_left >= 0 && fault_ == GqaFault::narrow_window) --variant.window_left;
    if (variant.window_left >= 0 && fault_ == GqaFault::wide_window) ++variant.window_left;
    if (fault_ == GqaFault::lost_soft_cap) variant.soft_cap = 0;
    return variant;
  }

  AttentionLayer make_layer(std::int64_t index) {
    const ModelConfig& config = model_.config();
    GqaDims dims = config.gqa;
    AttentionWeights weights = model_.gqa_weights(index);
    auto group = static_cast<std::size_t>(model_.layer(index).kv_group);
    if (fault_ == GqaFault::other_groups_rope) group = 1 - group;
    RopeConfig rope = config.groups[group].rope;
    AttentionOptions options{.qk_norm = config.qk_norm, .rms_norm_eps = config.rms_norm_eps};
    switch (fault_) {
      case GqaFault::lost_sinks:
        weights.sinks = {};
        break;
      case GqaFault::sinks_twice:
        weights.sinks = changed(weights.sinks, [](float x) { return x + std::log(2.f); });
        break;
      case GqaFault::lost_bias:
        weights.k_bias = {};
        break;
      case GqaFault::swapped_kv_heads:
        weights.v_proj = swapped_halves(weights.v_proj);
        break;
      case GqaFault::rope_pairing:
        rope.pairing = RopePairing::interleaved;
        break;
      case GqaFault::lost_q_norm:
        weights.q_norm = changed(weights.q_norm, [](float) { return 1.f; });
        break;
      case GqaFault::lost_post_scale:
        dims.sm_scale = 0;
        break;
      default:
        break;
    }
    return AttentionLayer(dims, weights, std::make_shared<RotaryEmbedding>(rope), options);
  }

  template <class Change>
  TensorView changed(const TensorView& vector, Change change) {
    Tensor values = Tensor::empty(DType::f32, {vector.shape[0]});
    copy(vector, values);
    for (std::int64_t i = 0; i < vector.shape[0]; ++i) {
      values.ptr<float>()[i] = change(values.ptr<float>()[i]);
    }
    Tensor result = Tensor::empty(vector.dtype, {vector.shape[0]});
    copy(values, result);
    memory_.push_back(std::move(result));
    return memory_.back();
  }

  /// Rows of the first and the second half of the heads change places.
  TensorView swapped_halves(const TensorView& matrix) {
    const std::int64_t rows = matrix.shape[0];
    Tensor result = Tensor::empty(matrix.dtype, {rows, matrix.shape[1]});
    copy(matrix.slice(0, 0, rows / 2), result.view().slice(0, rows / 2, rows));
    copy(matrix.slice(0, rows / 2, rows), result.view().slice(0, 0, rows / 2));
    memory_.push_back(std::move(result));
    return memory_.back();
  }

  const OpContext& ctx_;
  const Model& model_;
  GqaFault fault_;
  std::vector<Tensor> memory_;
  std::vector<AttentionLayer> layers_;
};

double worst_error(const Model& model, GqaFault fault) {
  Workload workload{"mutation", 5, {}};
  for (std::int32_t i = 0; i < 6; ++i) workload.requests.push_back({0, 20 + 13 * i, 6, -1, 0});
  const Runtime runtime({.num_threads = 1});
  FaultyGqaLayers faulty(runtime, model, fault);
  Verifier verifier(model, 30, 3);
  ServeHooks hooks;
  hooks.observers = {&faulty, &verifier};
  EngineOptions options;
  options.token_budget = 60;
  options.block_size = 128;  // Nothing is freed: a wider window finds its key.
  EXPECT_EQ(Engine(runtime, model, options).serve(workload, hooks).finished, 6);
  EXPECT_GT(verifier.rows(), 40);
  return verifier.worst_relative_error();
}

double worst_error(const Model& model, Fault fault) {
  Workload workload{"mutation", 5, {}};
  for (std::int32_t i = 0; i < 6; ++i) workload.requests.push_back({0, 20 + 13 * i, 6, -1, 0});
  const Runtime runtime({.num_threads = 1});
  FaultyLayers faulty(runtime, model, fault);
  Verifier verifier(model, 30, 3);
  ServeHooks hooks;
  hooks.observers = {&faulty, &verifier};
  EngineOptions options;
  options.token_budget = 60;
  EXPECT_EQ(Engine(runtime, model, options).serve(workload, hooks).finished, 6);
  EXPECT_GT(verifier.rows(), 40);
  return verifier.worst_relative_error();
}

TEST(Mutation, VerificationFailsOnEveryFaultInEveryDtype) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    SCOPED_TRACE(std::string(name_of(dtype)));
    const Model model = test::make_tiny_model({.dtype = dtype, .logit_spread = 0.7, .width = 4});
    const double limit = Verifier::limit(dtype);
    EXPECT_LT(worst_error(model, Fault::none), limit) << "the mutation itself does no harm";
    EXPECT_GT(worst_error(model, Fault::sm_scale), 3 * limit);
    EXPECT_GT(worst_error(model, Fault::rope_pairing), 3 * limit);
    EXPECT_GT(worst_error(model, Fault::lost_last_token), 3 * limit);
    EXPECT_GT(worst_error(model, Fault::swapped_keys_and_values), 3 * limit);
  }
}

TEST(Mutation, VerificationFailsOnEveryFaultOfGroupedQueries) {
  using F = GqaFault;
  const std::pair<const char*, std::vector<GqaFault>> kCases[] = {
      {"gpt_oss",
       {F::narrow_window, F::wide_window, F::lost_sinks, F::sinks_twice, F::lost_bias,
        F::swapped_kv_heads, F::rope_pairing}},
      {"gemma3_text",
       {F::narrow_window, F::wide_window, F::lost_soft_cap, F::swapped_kv_heads,
        F::other_groups_rope, F::lost_q_norm, F::lost_post_scale}}};
  for (const auto& [family, faults] : kCases) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(std::string(family) + " " + std::string(name_of(dtype)));
      const Model model = test::make_tiny_gqa_model(
          {.family = family, .num_layers = 2, .dtype = dtype, .logit_spread = 1.5, .width = 2});
      const double limit = Verifier::limit(dtype);
      EXPECT_LT(worst_error(model, F::none), limit) << "the mutation itself does no harm";
      for (const GqaFault fault : faults) {
        EXPECT_GT(worst_error(model, fault), 2 * limit) << static_cast<int>(fault);
      }
    }
  }
}

/// Shows the verifier a block table as if blocks had been given back one token too early.
TEST(Mutation, VerificationFailsOnABlockThatIsGivenBackTooEarly) {
  class EarlyRelease : public StepObserver {
   public:
    explicit EarlyRelease(Verifier& verifier) : verifier_(verifier) {}
    void on_layer(const LayerTrace& trace) override {
      LayerTrace changed = trace;
      std::vector<std::int32_t> table(trace.block_table.data,
                                      trace.block_table.data + trace.block_table.width);
      const std::int64_t window = trace.plan->variant.window_left;
      if (window >= 0 && trace.seq_lens.size() == 1) {
        const std::int64_t first = trace.positions[0] - window;
        if (first >= 0) {
          table[static_cast<std::size_t>(first / trace.cache->block_size())] = BlockTable::kNoBlock;
        }
        changed.block_table.data = table.data();
      }
      verifier_.on_layer(changed);
    }

   private:
    Verifier& verifier_;
  };
  const Model model = test::make_tiny_gqa_model({.num_layers = 1});
  Workload workload{"early", 5, {{0, 30, 9, -1, 0}}};
  const Runtime runtime({.num_threads = 1});
  Verifier verifier(model, 1000, 3);
  EarlyRelease early(verifier);
  ServeHooks hooks;
  hooks.observers = {&early};
  EngineOptions options;
  options.block_size = 1;
  Engine(runtime, model, options).serve(workload, hooks);
  EXPECT_EQ(verifier.worst_relative_error(), std::numeric_limits<double>::infinity());
}

TEST(Mutation, VerificationFailsOnOneNaN) {
  class NaNOutput : public StepObserver {
   public:
    void on_layer(const LayerTrace& trace) override {
      *trace.output.ptr<float>({trace.output.shape[0] - 1, 3}) =
          std::numeric_limits<float>::quiet_NaN();
    }
  } corrupt;
  const Model model = test::make_tiny_model();
  Workload workload{"nan", 5, {{0, 9, 3, -1, 0}}};
  const Runtime runtime({.num_threads = 1});
  Verifier verifier(model, 1000, 3);
  ServeHooks hooks;
  hooks.observers = {&corrupt, &verifier};
  Engine(runtime, model, {}).serve(workload, hooks);
  EXPECT_EQ(verifier.worst_relative_error(), std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace fovea
