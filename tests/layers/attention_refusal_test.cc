// Dimensions, weights, options and steps that are refused, and by which words.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "layers/gqa_world.h"

namespace fovea {
namespace {

using test::GqaShape;
using test::GqaWorld;

std::string refusal(const std::function<void()>& act,
                    ErrorCode code = ErrorCode::invalid_argument) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

TEST(GqaDims, DefaultsAreFilledIn) {
  const GqaDims dims = GqaDims{.hidden_size = 96, .num_heads = 6, .q_scaling = 2}.validated();
  EXPECT_EQ(dims.num_kv_heads, 6);
  EXPECT_EQ(dims.head_dim, 16);
  EXPECT_EQ(dims.v_head_dim, 16);
  EXPECT_EQ(dims.sm_scale, 0.125f);
  EXPECT_EQ(dims.validated().sm_scale, 0.125f);
  // A head dim of the config's own, and group-query head counts of Gemma 3.
  const GqaDims gemma =
      GqaDims{.hidden_size = 2560, .num_heads = 8, .num_kv_heads = 4, .head_dim = 256}.validated();
  EXPECT_EQ(gemma.sm_scale, 1.f / 16);
  EXPECT_EQ(gemma.qkv_size(), 4096);
}

TEST(GqaDims, ErrorsNameTheField) {
  const auto error_of = [](const GqaDims& dims) { return refusal([&] { dims.validated(); }); };
  EXPECT_EQ(error_of({.hidden_size = 0, .num_heads = 4}),
            "dims.hidden_size is 0, but must be in [1, 1048576]");
  EXPECT_EQ(error_of({.hidden_size = 64, .num_heads = 0}),
            "dims.num_heads is 0, but must be in [1, 1048576]");
  EXPECT_EQ(error_of({.hidden_size = 64, .num_heads = 6, .num_kv_heads = 4}),
            "dims.num_kv_heads is 4, but must divide num_heads = 6");
  EXPECT_EQ(error_of({.hidden_size = 65, .num_heads = 4}),
            "dims.head_dim is 0, but must be given: hidden_size = 65 is no multiple of num_heads = "
            "4");
  EXPECT_EQ(error_of({.hidden_size = 64, .num_heads = 4, .q_scaling = 0}),
            "dims.q_scaling is 0, but must be positive");
  EXPECT_EQ(error_of({.hidden_size = 64, .num_heads = 4, .q_scaling = 2, .sm_scale = 0.5f}),
            "dims.sm_scale is 0.5, but only one of it and q_scaling = 2 may be given");
}

TEST(GqaCache, ColumnsOfARowNeedAllOfIt) {
  const GqaDims dims = GqaDims{.hidden_size = 64, .num_heads = 4, .head_dim = 8}.validated();
  const PagedKvCache cache =
      PagedKvCache::allocate({DType::f32, 63}, {.num_blocks = 1, .block_size = 1});
  EXPECT_EQ(refusal([&] { GqaCache::columns_of(cache, dims); }),
            "cache has rows of 63, but must have rows of Hk * (D + Dv) = 64");
}

TEST(AttentionLayer, WeightsAndOptionsAreRefusedByName) {
  const GqaShape shape{.biases = true, .qk_norm = QkNorm::pre_rope, .sinks = true, .adapters = 2};
  const test::GqaLayerWeights source(shape, DType::f32, 1);
  const auto error_of =
      [&](const std::function<void(AttentionWeights&, AttentionOptions&)>& change) {
        AttentionWeights weights = source.views();
        AttentionOptions options{.qk_norm = QkNorm::pre_rope};
        change(weights, options);
        return refusal([&] { AttentionLayer(shape.dims, weights, nullptr, options); });
      };
  using W = AttentionWeights;
  using O = AttentionOptions;
  const auto expect = [&](const std::string& part, const auto& change) {
    EXPECT_NE(error_of(change).find(part), std::string::npos)
        << "expected " << part << ", got " << error_of(change);
  };
  expect("nothing was thrown", [](W&, O&) {});
  expect("qkv_proj and q_proj are absent", [](W& w, O&) { w.q_proj = {}; });
  expect("k_proj is absent", [](W& w, O&) { w.k_proj = {}; });
  expect("q_proj or q_bias is there", [](W& w, O&) {
    w.qkv_proj = w.q_proj;
    w.qkv_proj.shape[0] = 160;
  });
  expect("qkv_bias is there", [](W& w, O&) { w.qkv_bias = w.q_bias; });
  expect("v_bias is f32[96]", [](W& w, O&) { w.v_bias = w.q_bias; });
  expect("q_norm or k_norm is there", [](W&, O& o) { o.qk_norm = QkNorm::none; });
  expect("q_norm is absent", [](W& w, O&) { w.q_norm = {}; });
  expect("k_norm is f32[32]", [](W& w, O&) { w.k_norm = w.v_bias; });
  expect("o_proj is", [](W& w, O&) { w.o_proj = w.q_proj; });
  expect("sinks is f32[16]", [](W& w, O&) { w.sinks = w.q_norm; });
  expect("lora[0] has qkv and k", [](W& w, O&) { w.lora[0].k = w.lora[1].q; });
  expect("lora[1].q.b is f32[32, 4]", [](W& w, O&) { w.lora[1].q.b = w.lora[1].v.b; });
  expect("lora[0].o.a is absent", [](W& w, O&) { w.lora[0].o.a = {}; });
  expect("rope_fusion is fused", [](W&, O& o) {
    o.qk_norm = QkNorm::post_rope;
    o.rope_fusion = RopeFusion::fused;
  });
  expect("rms_norm_eps is -1", [](W&, O& o) { o.rms_norm_eps = -1; });
  RopeConfig wide;
  wide.dim = 18;
  wide.max_position = 4;
  EXPECT_EQ(refusal([&] {
              AttentionLayer(shape.dims, source.views(),
                             std::make_shared<const RotaryEmbedding>(wide),
                             {.qk_norm = QkNorm::pre_rope});
            }),
            "rotary turns 18 channels, but must turn at most head_dim = 16");
}

/// Refused, with a text that holds `part`, before the cache or the output was written.
class AttentionRefusal : public testing::Test {
 protected:
  AttentionRefusal() : world_({.shape = {.adapters = 2}}, {40, 40}) {
    world_.run({{0, 30}});
    step_ = world_.prepare({{0, 1}, {1, 4}});
    step_.step.plan = &step_.plan;
    workspace_.reserve(64 << 20);
  }
  void expect_refused(const std::string& part, const GqaCache& cache,
                      ErrorCode code = ErrorCode::invalid_argument) {
    OpContext ctx = world_.context();
    ctx.workspace = &workspace_;
    const std::string error =
        refusal([&] { world_.layer()(ctx, *step_.hidden, *step_.out, step_.step, cache); }, code);
    EXPECT_NE(error.find(part), std::string::npos) << "expected " << part << ", got " << error;
    const PagedKvCache& keys = world_.cache().k;
    EXPECT_TRUE(test::still_poisoned(keys.slot(world_.slot_of(0, 30)), keys.format().row_bytes()));
    for (double value : test::to_doubles(*step_.out)) EXPECT_TRUE(std::isnan(value));
  }
  void expect_refused(const std::string& part) { expect_refused(part, world_.cache()); }

  GqaWorld world_;
  GqaWorld::Step step_;
  Workspace workspace_;
};

TEST_F(AttentionRefusal, APlanForContextChunks) {
  step_.plan.paged_context = false;
  expect_refused("ContextPlanKind::paged");
}

TEST_F(AttentionRefusal, TooFewRowsOrPositionsOrTableRows) {
  AttentionStep good = step_.step;
  step_.plan.num_actual_tokens = 9;
  expect_refused("hidden is f32[7, 40]");
  step_.plan.num_actual_tokens = 5;
  step_.step.positions = {};
  expect_refused("positions is absent");
  step_.step = good;
  step_.step.positions = good.positions.slice(0, 0, 5);
  expect_refused("positions is i32[5]");
  step_.step = good;
  step_.step.slot_mapping = good.slot_mapping.slice(0, 0, 5);
  expect_refused("slot_mapping is i64[5]");
  step_.step = good;
  step_.step.block_table.requests = 1;
  expect_refused("block_table has 1 rows");
  step_.step.block_table = {nullptr, 2, 5, 5};
  expect_refused("block_table has no data");
}

TEST_F(AttentionRefusal, BlockIdsSlotsAndPositionsOutOfRange) {
  step_.table[0] = 1000;
  expect_refused("1000");
  step_ = world_.prepare({{0, 1}, {1, 4}});
  step_.step.plan = &step_.plan;
  test::assign(step_.slots.view().slice(0, 2, 3), std::vector<double>{1e6});
  expect_refused("slot_mapping");
  step_ = world_.prepare({{0, 1}, {1, 4}});
  step_.step.plan = &step_.plan;
  *step_.positions.ptr<std::int32_t>({0, 3}) = 4096;
  expect_refused("positions");
}

TEST_F(AttentionRefusal, AdaptersThatAreNotThere) {
  *step_.lora_ids.ptr<std::int32_t>({3}) = 2;
  expect_refused("lora_ids[3] is 2, but must be -1 or one of the layer's 2 adapters");
  *step_.lora_ids.ptr<std::int32_t>({3}) = -2;
  expect_refused("lora_ids[3] is -2");
  step_.step.lora_ids = step_.lora_ids.view().slice(0, 0, 5);
  expect_refused("lora_ids is i32[5]");
}

TEST_F(AttentionRefusal, CachesThatDoNotFit) {
  GqaCache cache = world_.cache();
  cache.v = cache.v.columns(0, 16);
  expect_refused("cache.v", cache);
  cache.v = PagedKvCache::allocate({DType::f32, 32}, {.num_blocks = 2, .block_size = 8});
  expect_refused("cache.v has 2 blocks of 8", cache);
}

TEST_F(AttentionRefusal, TooLittleWorkspace) {
  Workspace small;
  small.reserve(world_.layer().workspace_bytes(world_.context(), step_.plan) -
                Workspace::kAlignment);
  OpContext ctx = world_.context();
  ctx.workspace = &small;
  const std::string error =
      refusal([&] { world_.layer()(ctx, *step_.hidden, *step_.out, step_.step, world_.cache()); },
              ErrorCode::resource_exhausted);
  EXPECT_NE(error.find("workspace has"), std::string::npos) << error;
}

}  // namespace
}  // namespace fovea
