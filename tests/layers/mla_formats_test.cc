// MLA layers over every KV format, block size and path, on what is stored; quantised queries.
#include <gtest/gtest.h>

#include <string>

#include "fovea/error.h"
#include "layers/mla_world.h"

namespace fovea {
namespace {

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
const std::vector<std::int32_t> kLengths = {53, 15, 6};

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
