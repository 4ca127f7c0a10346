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
    ASSERT_EQ(results.size(), 9u);
    const MlaDims& dims = model.config().mla;
    for (std::size_t i = 0; i < results.size(); ++i) {
      SCOPED_TRACE(results[i].method);
      const char* methods[] = {"expanded_cache", "expand_every_step", "fovea"};
      EXPECT_EQ(results[i].method, methods[i % 3]);
      EXPECT_EQ(results[i].context, contexts[i / 3]);
      const std::int64_t row =
          i % 3 == 0 ? dims.num_heads * (dims.qk_head_dim() + dims.v_head_dim) : dims.latent_dim();
      EXPECT_EQ(results[i].cache_bytes, results[i].context * row * 4);
      EXPECT_GT(results[i].step_ms, 0);
      EXPECT_LT(results[i].worst_error, Verifier::limit(DType::f32));
    }
  }
}

TEST(CompareMethods, TakesQueriesWithoutALowRankToo) {
  const Model model = Model::load("deepseek-v2-lite", {.dtype = DType::bf16, .max_position = 64});
  const Runtime runtime({.num_threads = 2});
  const std::int64_t context = 40;
  for (const CompareResult& result : compare_methods(runtime, model, std::span(&context, 1))) {
    EXPECT_LT(result.worst_error, Verifier::limit(DType::bf16)) << result.method;
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
