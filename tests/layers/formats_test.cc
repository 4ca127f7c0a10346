// Layers over every KV format, block size and path, on what is stored; quantised queries.
#include <gtest/gtest.h>

#include <string>

#include "fovea/error.h"
#include "layers/allocations.h"
#include "layers/gqa_world.h"
#include "layers/mla_world.h"

namespace fovea {
namespace {

using test::GqaWorld;
using test::LayerShape;
using test::World;
using test::WorldOptions;

constexpr std::int64_t kBlockSizes[] = {1, 16, 48, 64, 100};

/// fp8_ds_mla has widths of its own.
LayerShape shape_of(std::string_view kv_format) {
  if (kv_format != "fp8_ds_mla") return {};
  return {.heads = 2, .latent = 512, .nope = 16, .rope = 64, .value = 16};
}

/// Prefill; decode beside a prefill with context; context in chunks of 16 rows; decodes.
void serve(World& world) {
  world.run({{0, 37}, {1, 4}});
  world.run({{1, 1}, {0, 6}});
  world.run({{1, 9}, {0, 9}, {2, 5}});
  world.run({{0, 1}, {1, 1}, {2, 1}});
}
const std::vector<std::int32_t> kLengths = {60, 20, 6};

/// With what the step asks for reserved, it takes nothing else: no decoded copy of anything.
template <class World>
void expect_no_allocations(World& world, const std::vector<test::Extend>& extends) {
  auto s = world.prepare(extends);
  s.step.plan = &s.plan;
  OpContext ctx = world.context();
  Workspace workspace;
  workspace.reserve(world.layer().workspace_bytes(ctx, s.plan));
  ctx.workspace = &workspace;
  const auto step = [&] { world.layer()(ctx, *s.hidden, *s.out, s.step, world.cache()); };
  step();
  if (!test::computes_on_host(ctx)) return;  // cuBLASLt allocates as it likes.
  EXPECT_LE(test::count_allocations(step), 0);
}

class MlaFormats : public testing::TestWithParam<std::string_view> {};
INSTANTIATE_TEST_SUITE_P(, MlaFormats, testing::ValuesIn(kv_format_names()),
                         [](const auto& format) { return std::string(format.param); });

TEST_P(MlaFormats, EveryPathEqualsTheStoredValuesInBlocksOfAnySize) {
  for (const std::int64_t block_size : kBlockSizes) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE("blocks of " + std::to_string(block_size));
      World world({.shape = shape_of(GetParam()),
                   .dtype = dtype,
                   .kv_format = std::string(GetParam()),
                   .kv_scale = 0.0137f,  // B126, B133: neither 1 nor a power of two.
                   .block_size = block_size,
                   .workspace_rows = std::max<std::int64_t>(16, block_size)},
                  kLengths);
      serve(world);
      expect_no_allocations(world, {{1, 1}, {0, 6}});
    }
  }
}

TEST_P(MlaFormats, QuantisedQueriesOnEveryPath) {  // F164, F167, B117, B126
  for (const MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
    WorldOptions options{.shape = shape_of(GetParam()),
                         .kv_format = std::string(GetParam()),
                         .kv_scale = 0.25f,
                         .absorption = absorption,
                         .q_scale = 0.002f,  // Saturates: queries are around 1.
                         .workspace_rows = 16};
    World world(options, kLengths);
    serve(world);
    options.q_scale = 0;
    World exact(options, kLengths);
    serve(exact);
    EXPECT_NE(world.outputs(0), exact.outputs(0));
  }
}

TEST(MlaFormats656, ADecodeBesideAShortPrefillWithContext) {  // B134
  World world({.shape = shape_of("fp8_ds_mla"), .kv_format = "fp8_ds_mla", .block_size = 64},
              {31, 106});
  world.run({{0, 30}, {1, 100}});
  world.run({{0, 1}, {1, 6}});
}

/// Keys are turned once, before they are rounded.
TEST(GqaFormats, EveryPathEqualsTheStoredValuesInBlocksOfAnySize) {  // B117, B140, B141
  for (const std::string_view name : kv_format_names()) {
    if (name == "fp8_ds_mla") continue;  // A latent row.
    for (const std::int64_t block_size : kBlockSizes) {
      SCOPED_TRACE(std::string(name) + " in blocks of " + std::to_string(block_size));
      GqaWorld world({.block_size = block_size,
                      .kv_format = std::string(name),
                      .kv_scale = 0.0137f},
                     kLengths);
      world.run({{0, 37}, {1, 4}});
      world.run({{1, 1}, {0, 6}});
      world.run({{1, 9}, {0, 9}, {2, 5}});
      world.run({{0, 1}, {1, 1}, {2, 1}});
      expect_no_allocations(world, {{1, 1}, {0, 6}});
    }
  }
}

TEST(MlaQuantisedQueries, RoundInTheLayersDtypeToo) {
  // Of bf16 queries some fall on the other side of a code's border.
  World world({.shape = {},
               .dtype = DType::bf16,
               .kv_format = "fp8_e4m3",
               .kv_scale = 0.05f,
               .q_scale = 0.03f,
               .output_limit = 0.06},
              kLengths);
  serve(world);
}

TEST(MlaQuantisedQueries, AScaleThatIsNoneIsRefused) {
  const LayerShape shape;
  const test::LayerWeights weights(shape, DType::f32, 1);
  for (const float q_scale : {-1.f, std::numeric_limits<float>::infinity()}) {
    try {
      const MlaLayer layer(shape.dims(), weights.views(), nullptr, {.q_scale = q_scale});
      ADD_FAILURE() << "q_scale of " << q_scale << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find("q_scale is"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace fovea
