// What must not matter: how a prompt is cut into steps, block size, which blocks, batch mates and
// their order, padding rows, workspace size, threads.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "layers/mla_world.h"

namespace fovea {
namespace {

using test::Extend;
using test::World;
using test::WorldOptions;

const std::vector<std::int32_t> kLengths = {70, 45, 17, 100};

using Serve = std::function<void(World&)>;

/// Each prompt in one step, then 5 decodes together.
void serve_plainly(World& world) {
  world.prefill_all_but(5);
  for (int i = 0; i < 5; ++i) world.run({{0, 1}, {1, 1}, {2, 1}, {3, 1}});
}

class Invariance : public testing::TestWithParam<DType> {
 protected:
  WorldOptions options() const {
    WorldOptions result;
    result.dtype = GetParam();
    result.workspace_rows = 4096;
    return result;
  }
  /// Outputs and stored rows of `serve` under `changed` equal those of the plain run.
  void expect_same(const WorldOptions& changed, const Serve& serve, const std::string& what) {
    World plain(options(), kLengths), other(changed, kLengths);
    serve_plainly(plain);
    serve(other);
    // Twice one run's own limit: both may be off.
    const double limit = 2 * World::relative_limit(GetParam());
    const std::int64_t width = changed.shape.hidden;
    for (std::size_t i = 0; i < kLengths.size(); ++i) {
      ASSERT_EQ(other.done(i), kLengths[i]) << what;
      EXPECT_LT(test::worst_row_difference(plain.outputs(i), other.outputs(i), width), limit)
          << what << ", sequence " << i;
      EXPECT_LT(test::worst_row_difference(plain.stored_rows(i), other.stored_rows(i),
                                           changed.shape.latent + changed.shape.rope),
                GetParam() == DType::f32 ? 1e-6 : limit)
          << what << ", stored rows of sequence " << i;
    }
  }
};

TEST_P(Invariance, AnyCutOfPromptsIntoSteps) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    WorldOptions changed = options();
    changed.workspace_rows = 128;
    const auto random_steps = [&](World& world) {
      std::uint64_t draw = 0;
      while (true) {
        std::vector<Extend> decodes, prefills;
        for (std::size_t i = 0; i < kLengths.size(); ++i) {
          const std::int32_t left = kLengths[i] - world.done(i);
          if (left == 0 || test::random_below(seed, ++draw, 3) == 0) continue;
          const auto tokens = static_cast<std::int32_t>(
              std::min<std::int64_t>(left, 1 + test::random_below(seed, ++draw, 40)));
          // One token with context is a decode.
          const bool decode = tokens == 1 && world.done(i) > 0;
          (decode ? decodes : prefills).push_back({i, tokens});
        }
        decodes.insert(decodes.end(), prefills.begin(), prefills.end());
        // One first token without context counts as a decode too.
        std::stable_partition(decodes.begin(), decodes.end(),
                              [](const Extend& extend) { return extend.tokens == 1; });
        if (!decodes.empty()) world.run(decodes);
        bool finished = true;
        for (std::size_t i = 0; i < kLengths.size(); ++i) {
          finished = finished && world.done(i) == kLengths[i];
        }
        if (finished) return;
      }
    };
    expect_same(changed, random_steps, "seed " + std::to_string(seed));
  }
}

/// Prompts in two halves, so that there is context, then decodes.
void serve_in_halves(World& world) {
  world.run({{0, 30}, {1, 20}, {2, 6}, {3, 60}});
  world.run({{0, 35}, {1, 20}, {2, 6}, {3, 35}});
  for (int i = 0; i < 5; ++i) world.run({{0, 1}, {1, 1}, {2, 1}, {3, 1}});
}

TEST_P(Invariance, BlockSize) {
  for (std::int64_t block_size : {1, 7, 64, 100}) {
    WorldOptions changed = options();
    changed.block_size = block_size;
    expect_same(changed, serve_in_halves, "block size " + std::to_string(block_size));
  }
}

TEST_P(Invariance, WhichBlocks) {
  for (std::uint64_t seed : {2, 3}) {
    WorldOptions changed = options();
    changed.block_seed = seed;
    expect_same(changed, serve_in_halves, "block seed " + std::to_string(seed));
  }
}

TEST_P(Invariance, WorkspaceAndContextPlan) {
  for (ContextPlanKind kind : {ContextPlanKind::packed, ContextPlanKind::equal}) {
    for (std::int64_t rows : {64, 96, 117, 65536}) {
      WorldOptions changed = options();
      changed.context_plan = kind;
      changed.workspace_rows = rows;
      expect_same(changed, serve_in_halves, "workspace of " + std::to_string(rows));
    }
  }
}

TEST_P(Invariance, OrderOfTheBatch) {
  expect_same(
      options(),
      [](World& world) {
        world.run({{3, 60}, {2, 6}, {1, 20}, {0, 30}});
        world.run({{2, 6}, {0, 35}, {3, 35}, {1, 20}});
        for (int i = 0; i < 5; ++i) world.run({{1, 1}, {3, 1}, {0, 1}, {2, 1}});
      },
      "other order");
}

TEST_P(Invariance, BatchMates) {
  expect_same(
      options(),
      [](World& world) {
        for (std::size_t i = 0; i < kLengths.size(); ++i) {
          world.run({{i, kLengths[i] - 5}});
          for (int k = 0; k < 5; ++k) world.run({{i, 1}});
        }
      },
      "each alone");
}

TEST_P(Invariance, PaddingThreadsAndAbsorption) {
  for (std::int64_t rows : {0, 9}) {
    WorldOptions changed = options();
    changed.padding_rows = rows;
    expect_same(changed, serve_in_halves, "padding of " + std::to_string(rows));
  }
  for (int threads : {1, 3}) {
    WorldOptions changed = options();
    changed.threads = threads;
    expect_same(changed, serve_in_halves, "threads " + std::to_string(threads));
  }
  WorldOptions changed = options();
  changed.absorption = MlaAbsorption::full;
  expect_same(changed, serve_in_halves, "full absorption");
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Invariance, testing::Values(DType::f32, DType::bf16),
                         [](const auto& info_) { return std::string(name_of(info_.param)); });

TEST(NanInput, StaysInTheRowsThatSeeIt) {
  // A NaN hidden state poisons its own row and the later rows of its sequence, and nothing else.
  World solo({}, {20, 20}), mixed({}, {20, 20});
  for (World* world : {&solo, &mixed}) world->run({{0, 8}, {1, 8}});
  World::Step s = mixed.prepare({{0, 5}, {1, 5}});
  s.step.plan = &s.plan;
  test::poison(s.hidden->view().slice(0, 2, 3));
  OpContext ctx = mixed.context();
  Workspace workspace;
  workspace.reserve(mixed.layer().workspace_bytes(ctx, s.plan));
  ctx.workspace = &workspace;
  mixed.layer()(ctx, *s.hidden, *s.out, s.step, mixed.cache());
  solo.run({{0, 5}, {1, 5}});
  const std::vector<double> got = test::to_doubles(*s.out);
  for (std::size_t row = 0; row < 10; ++row) {
    for (std::size_t c = 0; c < 48; ++c) {
      const double value = got[row * 48 + c];
      EXPECT_EQ(std::isnan(value), row >= 2 && row < 5) << row;
      if (row >= 2 && row < 5) continue;
      const std::size_t sequence = row < 5 ? 0 : 1;
      EXPECT_EQ(value, solo.outputs(sequence)[(8 + row % 5) * 48 + c]) << row;
    }
  }
}

}  // namespace
}  // namespace fovea
