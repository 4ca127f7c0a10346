// Tiny models served by a GPU: prefills, chunks and mixed steps as they come, decode steps in CUDA
// graphs, all of them verified.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "fovea/engine.h"
#include "fovea/error.h"
#include "fovea/runtime.h"
#include "model/checkpoint_files.h"
#include "support/tiny_model.h"

namespace fovea {
namespace {

class DeviceServing : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      runtime_ = std::make_unique<Runtime>(
          RuntimeOptions{.backend = "cuda", .num_threads = 1, .own_cuda_stream = true});
      const Tensor weight = Tensor::zeros(DType::f32, {1, 1});
      Linear(weight, {}, LinearBackend::automatic, runtime_->context().memory);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
      GTEST_SKIP() << error.what();
    }
  }

  Model load() const {
    return Model::load(directory_.path(),
                       {.dtype = DType::f32, .memory = runtime_->context().memory});
  }

  void serve(const Model& model, const EngineOptions& options) const {
    // Few at the end, many at once in between: decode steps of several sizes.
    Workload workload{"mixed", 11, {}};
    const std::int32_t prompts[] = {1, 16, 17, 90, 64, 33, 2, 130};
    for (std::int32_t i = 0; i < 8; ++i) {
      workload.requests.push_back({.prompt_tokens = prompts[i], .answer_tokens = 1 + i * 5 % 13});
    }
    Verifier verifier(model, 200, 1);
    ServeHooks hooks;
    hooks.observers = {&verifier};
    const ServeReport report =
        Engine(runtime_->context(), model, options).serve(workload, hooks);
    EXPECT_EQ(report.finished, 8);
    EXPECT_GT(report.decode_steps, 4);  // A drafting request gets up to four tokens of one.
    EXPECT_GT(verifier.rows(), 200);
    EXPECT_LE(verifier.worst_relative_error(), 1e-5) << verifier.worst_row();
  }

  test::TempDir directory_;
  std::unique_ptr<Runtime> runtime_;
};

EngineOptions options() {
  EngineOptions options;
  options.max_num_seqs = 6;
  options.token_budget = 100;
  return options;
}

TEST_F(DeviceServing, LatentAttention) {
  test::write_tiny_model(directory_.path(), {});
  const Model model = load();
  serve(model, options());
  EngineOptions drafts = options();
  drafts.draft_tokens = 3;
  drafts.draft_acceptance = 0.5;
  serve(model, drafts);
}

TEST_F(DeviceServing, GroupedQueriesWithWindowsAndSinks) {
  test::write_tiny_gqa_model(directory_.path(), {});
  serve(load(), options());
}

TEST_F(DeviceServing, NormBeforeTheResidualAndSoftCap) {
  test::write_tiny_gqa_model(directory_.path(), {.family = "gemma3_text"});
  serve(load(), options());
}

}  // namespace
}  // namespace fovea
