#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "engine/serving.h"

namespace fovea {
namespace {

TEST(CompareMethods, AllGiveTheSameRowAndTheirCacheBytes) {
  const Model model = test::make_tiny_model({.num_layers = 1});
  for (int threads : {1, 3}) {
    SCOPED_TRACE(threads);
    const Runtime runtime({.num_threads = threads});
    const std::array<std::int64_t, 3> contexts{1, 17, 600};
    const std::vector<CompareResult> results = compare_methods(runtime, model, contexts);
    ASSERT_EQ(results.size(), 15u);
    const MlaDims& dims = model.config().mla;
    const std::int64_t latent = dims.latent_dim();
    const struct {
      const char* method;
      std::int64_t row_bytes;
      double limit;  ///< Of the error; formats of few bits lose theirs.
    } methods[] = {
        {"expanded_cache", dims.num_heads * (dims.qk_head_dim() + dims.v_head_dim) * 4, 1e-4},
        {"expand_every_step", latent * 4, 1e-4},
        {"fovea", latent * 4, 1e-4},
        {"fovea, int8_per_token", latent + 8, 0.1},
        {"fovea, int4_per_token", latent / 2 + 8, 1},
    };
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto& expected = methods[i % 5];
      SCOPED_TRACE(results[i].method);
      EXPECT_EQ(results[i].method, expected.method);
      EXPECT_EQ(results[i].context, contexts[i / 5]);
      EXPECT_EQ(results[i].cache_bytes, results[i].context * expected.row_bytes);
      EXPECT_GT(results[i].step_ms, 0);
      EXPECT_LT(results[i].worst_error, expected.limit);
    }
  }
}

TEST(CompareMethods, TakesQueriesWithoutALowRankToo) {
  const Model model = Model::load("deepseek-v2-lite", {.dtype = DType::bf16, .max_position = 64});
  const Runtime runtime({.num_threads = 2});
  const std::int64_t context = 40;
  for (const CompareResult& result : compare_methods(runtime, model, std::span(&context, 1))) {
    const bool is_scaled = result.method.find("_per_token") != std::string::npos ||
                           result.method.find("fp8") != std::string::npos;
    EXPECT_LT(result.worst_error, is_scaled ? 1 : Verifier::limit(DType::bf16)) << result.method;
  }
}

TEST(CompareMethods, RefusesAContextBeyondTheModel) {
  const Model model = test::make_tiny_model({.num_layers = 1});
  const Runtime runtime({.num_threads = 1});
  const std::int64_t context = 641;
  EXPECT_EQ(test::error_of(ErrorCode::invalid_argument,
                           [&] { compare_methods(runtime, model, std::span(&context, 1)); }),
            "context is 641, must be from 1 to 640, the model's positions");
}

}  // namespace
}  // namespace fovea
