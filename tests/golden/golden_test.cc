// The MLA layer against outputs that make_goldens.py computed in float64 from the same configs,
// with weights that both sides make from a seed.
#include <gtest/gtest.h>

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

const char* const kFolder = "cases";

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  Golden()
      : config_(test::read_config(kFolder, GetParam())),
        expected_latent_(test::to_doubles(goldens_[GetParam() + ".latent"])),
        expected_(test::to_doubles(goldens_[GetParam() + ".output"])) {
    const std::unique_ptr<ThreadPool> pool = make_std_thread_pool();
    weights_ = seeded_layer(config_, test::kGoldenSeed, 0, DType::f32, *pool);
    const TensorView output = goldens_[GetParam() + ".output"];
    hidden_ = test::hidden_states(output.shape[0], output.shape[1]);
  }

  void check(const Runtime& runtime, const MlaLayer& layer, const Steps& steps) const {
    SCOPED_TRACE(steps.name);
    const std::int64_t tokens = hidden_.view().shape[0];
    const Tensor out = Tensor::empty(DType::f32, {tokens, config_.mla.hidden_size});
    test::SequenceRunner runner(runtime, layer, tokens, {.workspace_rows = steps.workspace_rows});
    EXPECT_GE(runner.run(hidden_, out, steps.sizes), steps.least_chunks);
    EXPECT_TRUE(test::rows_close(expected_, out, {1e-4}));
    const auto latent_dim = static_cast<std::size_t>(config_.mla.latent_dim());
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto row =
          std::span(expected_latent_).subspan(static_cast<std::size_t>(t) * latent_dim, latent_dim);
      ASSERT_TRUE(test::rows_close(row, runner.stored_row(t), {1e-5})) << "stored row " << t;
    }
  }

  ModelConfig config_;
  test::Goldens goldens_;
  std::vector<double> expected_latent_;
  std::vector<double> expected_;
  LayerMemory weights_;
  Tensor hidden_;
};

TEST_P(Golden, EveryWayToRunGivesTheSame) {
  const auto rotary = std::make_shared<const RotaryEmbedding>(config_.groups[0].rope);
  const std::int64_t tokens = hidden_.view().shape[0];
  for (const char* backend : {"auto", "reference"}) {
    const Runtime runtime({.backend = backend, .num_threads = 2});
    for (const MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
      SCOPED_TRACE(backend);
      const MlaLayer layer(config_.mla, weights_.tensors.mla, rotary,
                           {.absorption = absorption, .rms_norm_eps = config_.latent_norm_eps});
      for (const Steps& steps : ways_to_run(tokens)) check(runtime, layer, steps);
      if (config_.mla.hidden_size > 1024) return;  // Once is enough of the real dimensions.
    }
  }
}

/// Tiny dimensions, where a layer costs nothing.
class GoldenControl : public Golden {};

// The comparison itself must be able to fail.
TEST_P(GoldenControl, WrongScalePairingOrLengthIsNoticed) {
  const Runtime runtime({.num_threads = 2});
  const std::int64_t tokens = hidden_.view().shape[0];
  auto is_close = [&](const MlaDims& dims, const RopeConfig& rope, float eps) {
    const MlaLayer layer(dims, weights_.tensors.mla, std::make_shared<const RotaryEmbedding>(rope),
                         {.rms_norm_eps = eps});
    const Tensor out = Tensor::empty(DType::f32, {tokens, dims.hidden_size});
    test::SequenceRunner(runtime, layer, tokens).step(hidden_, out);
    return static_cast<bool>(test::rows_close(expected_, out, {1e-4}));
  };
  EXPECT_TRUE(is_close(config_.mla, config_.groups[0].rope, config_.latent_norm_eps));

  MlaDims dims = config_.mla;
  dims.sm_scale *= 1.01f;
  EXPECT_FALSE(is_close(dims, config_.groups[0].rope, config_.latent_norm_eps));
  RopeConfig rope = config_.groups[0].rope;
  rope.pairing = rope.pairing == RopePairing::neox ? RopePairing::interleaved : RopePairing::neox;
  EXPECT_FALSE(is_close(config_.mla, rope, config_.latent_norm_eps));
  rope = config_.groups[0].rope;
  rope.theta *= 1.1;
  EXPECT_FALSE(is_close(config_.mla, rope, config_.latent_norm_eps));
  rope = config_.groups[0].rope;
  rope.scaling = {};
  EXPECT_EQ(is_close(config_.mla, rope, config_.latent_norm_eps),
            std::holds_alternative<std::monostate>(config_.groups[0].rope.scaling));
  EXPECT_FALSE(is_close(config_.mla, config_.groups[0].rope, 1e-2f));
}

std::vector<std::string> tiny_case_names() {
  std::vector<std::string> names = case_names(kFolder);
  std::erase_if(names, [](const std::string& name) { return name.ends_with("_real_dims"); });
  return names;
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, ::testing::ValuesIn(case_names(kFolder)), name_of_case);
INSTANTIATE_TEST_SUITE_P(Cases, GoldenControl, ::testing::ValuesIn(tiny_case_names()),
                         name_of_case);

}  // namespace
}  // namespace fovea
