// Attention layers against outputs that make_goldens.py computed in float64 from the same configs,
// with weights that both sides make from a seed.
#include <gtest/gtest.h>

#include <functional>

#include "golden/golden_cases.h"
#include "model/seeded_weights.h"
#include "support/compare.h"
#include "support/sequence_runner.h"

namespace fovea {
namespace {

using test::case_names;
using test::name_of_case;
using test::Steps;
using test::ways_to_run;

const char* const kFolder = "gqa_cases";

class GqaGolden : public ::testing::TestWithParam<std::string> {
 protected:
  GqaGolden() : config_(test::read_config(kFolder, GetParam())) {
    const std::unique_ptr<ThreadPool> pool = make_std_thread_pool();
    for (std::int64_t i = 0; i < config_.num_layers; ++i) {
      weights_.push_back(seeded_layer(config_, test::kGoldenSeed, i, DType::f32, *pool));
    }
    hidden_ = test::hidden_states(golden(0, "output").shape[0], config_.hidden_size);
  }

  TensorView golden(std::int64_t layer, const std::string& name) const {
    return goldens_[GetParam() + "." + std::to_string(layer) + "." + name];
  }

  static const KvGroupConfig& group_of(const ModelConfig& config, std::int64_t layer) {
    const std::int32_t group = config.layer_group[static_cast<std::size_t>(layer)];
    return config.groups[static_cast<std::size_t>(group)];
  }

  AttentionLayer make_layer(const ModelConfig& config, std::int64_t layer) const {
    AttentionWeights weights = weights_[static_cast<std::size_t>(layer)].tensors.gqa;
    if (!config.sinks) weights.sinks = {};
    const RopeConfig& rope = group_of(config, layer).rope;
    return AttentionLayer(config.gqa, weights, std::make_shared<const RotaryEmbedding>(rope),
                          {.qk_norm = config.qk_norm, .rms_norm_eps = config.rms_norm_eps});
  }

  void check(const Runtime& runtime, std::int64_t index, const Steps& steps) const {
    SCOPED_TRACE(std::string(steps.name) + ", layer " + std::to_string(index));
    const AttentionLayer layer = make_layer(config_, index);
    const std::int64_t tokens = hidden_.view().shape[0];
    const Tensor out = Tensor::empty(DType::f32, {tokens, config_.hidden_size});
    test::SequenceRunner runner(runtime, layer, tokens,
                                {.variant = group_of(config_, index).variant});
    runner.run(hidden_, out, steps.sizes);
    EXPECT_TRUE(test::rows_close(test::to_doubles(golden(index, "output")), out, {1e-4}));
    for (std::int64_t t = 0; t < tokens; ++t) {
      ASSERT_TRUE(test::rows_close(test::to_doubles(golden(index, "rows").select(0, t)),
                                   runner.stored_row(t), {1e-5}))
          << "stored row " << t;
    }
  }

  /// Whether all layers of `config` give the stored outputs.
  bool is_close(const ModelConfig& config) const {
    const Runtime runtime({.num_threads = 2});
    bool close = true;
    for (std::int64_t i = 0; i < config.num_layers; ++i) {
      const AttentionLayer layer = make_layer(config, i);
      const std::int64_t tokens = hidden_.view().shape[0];
      const Tensor out = Tensor::empty(DType::f32, {tokens, config.hidden_size});
      test::SequenceRunner(runtime, layer, tokens, {.variant = group_of(config, i).variant})
          .step(hidden_, out);
      const std::vector<double> expected = test::to_doubles(golden(i, "output"));
      close = close && test::rows_close(expected, out, {1e-4});
    }
    return close;
  }

  ModelConfig config_;
  test::Goldens goldens_;
  std::vector<LayerMemory> weights_;
  Tensor hidden_;
};

TEST_P(GqaGolden, EveryWayToRunGivesTheSame) {
  for (const char* backend : {"auto", "reference"}) {
    SCOPED_TRACE(backend);
    const Runtime runtime({.backend = backend, .num_threads = 2});
    for (const Steps& steps : ways_to_run(hidden_.view().shape[0])) {
      for (std::int64_t i = 0; i < config_.num_layers; ++i) check(runtime, i, steps);
    }
  }
}

// The comparison itself must be able to fail.
TEST_P(GqaGolden, AnythingWrongInTheConfigIsNoticed) {
  EXPECT_TRUE(is_close(config_));
  auto notices = [&](const std::function<void(ModelConfig&)>& change) {
    ModelConfig wrong = config_;
    change(wrong);
    return !is_close(wrong);
  };
  EXPECT_TRUE(notices([](ModelConfig& c) { c.gqa.sm_scale *= 1.01f; }));
  for (std::size_t g = 0; g < config_.groups.size(); ++g) {
    SCOPED_TRACE(g);
    const KvGroupConfig& right = config_.groups[g];
    EXPECT_TRUE(notices([&](ModelConfig& c) { c.groups[g].rope.theta *= 1.1; }));
    EXPECT_TRUE(
        notices([&](ModelConfig& c) { c.groups[g].rope.pairing = RopePairing::interleaved; }));
    const bool scales = !std::holds_alternative<std::monostate>(right.rope.scaling);
    EXPECT_EQ(notices([&](ModelConfig& c) { c.groups[g].rope.scaling = {}; }), scales);
    if (auto* yarn = std::get_if<YarnScaling>(&right.rope.scaling)) {
      EXPECT_TRUE(notices([&](ModelConfig& c) {
        std::get<YarnScaling>(c.groups[g].rope.scaling).truncate = !yarn->truncate;
      }));
    }
    if (right.variant.window_left >= 0) {
      EXPECT_TRUE(notices([&](ModelConfig& c) { ++c.groups[g].variant.window_left; }));
      EXPECT_TRUE(notices([&](ModelConfig& c) { --c.groups[g].variant.window_left; }));
    }
    EXPECT_EQ(notices([&](ModelConfig& c) { c.groups[g].variant.soft_cap = 0; }),
              right.variant.soft_cap > 0);
  }
  EXPECT_EQ(notices([](ModelConfig& c) { c.sinks = false; }), config_.sinks);
  EXPECT_EQ(notices([](ModelConfig& c) { c.rms_norm_eps = 1e-2f; }),
            config_.qk_norm != QkNorm::none);
}

INSTANTIATE_TEST_SUITE_P(Cases, GqaGolden, ::testing::ValuesIn(case_names(kFolder)), name_of_case);

}  // namespace
}  // namespace fovea
