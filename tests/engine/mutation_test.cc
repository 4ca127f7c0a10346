// Mistakes that an attention engine can make and still give smooth, plausible numbers: each must
// make verification fail.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine/serving.h"

namespace fovea {
namespace {

enum class Fault { none, sm_scale, rope_pairing, lost_last_token, swapped_keys_and_values };

/// Puts a layer with one fault in the place of the model's: its rows go into the cache and its
/// outputs to whoever looks next.
class FaultyLayers : public StepObserver {
 public:
  FaultyLayers(const OpContext& ctx, const Model& model, Fault fault)
      : ctx_(ctx), model_(model), fault_(fault) {
    for (std::int64_t i = 0; i < model.num_layers(); ++i) layers_.push_back(make_layer(i));
  }

  void on_layer(const LayerTrace& trace) override {
    const Tensor normed =
        Tensor::empty(trace.input.dtype, {trace.input.shape[0], trace.input.shape[1]});
    rms_norm(ctx_, {.x = trace.input,
                    .weight = model_.layer(trace.layer).input_layernorm,
                    .out = normed,
                    .eps = model_.config().rms_norm_eps});
    const BatchPlan plan = make_step_plan(trace);
    const std::vector<std::int64_t> slots = slots_of(trace);
    AttentionStep step;
    step.plan = &plan;
    step.block_table = trace.block_table;
    step.slot_mapping = TensorView::of(slots.data(), {std::ssize(slots)});
    step.positions = TensorView::of(trace.positions.data(), {std::ssize(trace.positions)});
    const MlaLayer& layer = layers_[static_cast<std::size_t>(trace.layer)];
    ctx_.workspace->reserve(layer.workspace_bytes(ctx_, plan));
    layer(ctx_, normed, trace.output, step, *trace.cache);
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

  static std::vector<std::int64_t> slots_of(const LayerTrace& trace) {
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

  const OpContext& ctx_;
  const Model& model_;
  Fault fault_;
  std::vector<Tensor> memory_;
  std::vector<MlaLayer> layers_;
};

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
