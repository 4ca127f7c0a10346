// What the scheduler picks, admits, refuses and puts back.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "engine/scheduler_player.h"

namespace fovea::engine {
namespace {

/// Everything that is seen, and up to two groups that see less.
std::vector<AttentionVariant> random_variants(unsigned seed, std::mt19937& random) {
  std::vector<AttentionVariant> variants(1);
  if (seed % 2 == 0) return variants;
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  variants.push_back({.window_left = pick(0, 20)});
  if (seed % 4 == 1) variants.push_back({.attention_chunk = pick(1, 24)});
  if (seed % 8 == 3) variants[0].window_left = pick(0, 30);  // Nothing sees everything.
  return variants;
}

TEST(Scheduler, AnswersEveryRequestOnceOnRandomWorkloadsAndTinyPools) {
  std::int64_t preemptions = 0, hits = 0, windowed_hits = 0, refused = 0, freed = 0;
  for (unsigned seed = 0; seed < 300 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&](std::int64_t low, std::int64_t high) {
      return std::uniform_int_distribution<std::int64_t>(low, high)(random);
    };
    std::vector<RequestSpec> requests;
    const std::int64_t count = pick(1, 25);
    for (std::int64_t i = 0; i < count; ++i) {
      RequestSpec spec =
          request(static_cast<std::int32_t>(pick(1, 50)), static_cast<std::int32_t>(pick(1, 15)));
      if (pick(0, 1) == 0) {
        spec.prefix_group = static_cast<std::int32_t>(pick(0, 2));
        spec.prefix_tokens = static_cast<std::int32_t>(pick(0, spec.prompt_tokens));
      }
      requests.push_back(spec);
    }
    const Workload workload = make_workload(std::move(requests));
    const std::int64_t block_size = std::vector<std::int64_t>{1, 3, 4, 16}[seed % 4];
    const std::vector<AttentionVariant> variants = random_variants(seed, random);
    std::vector<BlockPool> pools;
    std::vector<GroupBlocks> groups;
    pools.reserve(variants.size());
    for (const AttentionVariant& variant : variants) {
      groups.push_back({variant, &pools.emplace_back(pick(30, 150) / block_size, block_size)});
    }
    SchedulerOptions options{.max_num_seqs = pick(1, 8),
                             .token_budget = pick(1, 2) == 1 ? pick(1, 6) : pick(7, 64),
                             .max_position = 60,
                             .vocab_size = 1 + (seed / 8 % 2) * 500,
                             .prefix_reuse = seed % 3 != 0,
                             .drafts = {}};
    if (seed % 5 < 2) options.drafts = {pick(1, 5), 0.6, seed};
    Player player(workload, groups, options);
    std::vector<std::int64_t> accepted;
    std::int64_t tokens = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      if (!player.scheduler().refusal(i).empty()) {
        ++refused;
        continue;
      }
      accepted.push_back(i);
      tokens += workload.requests[static_cast<std::size_t>(i)].computed_tokens();
      player.add(i);
      for (std::int64_t steps = pick(0, 3); steps > 0; --steps) player.step();
    }
    player.run(20000);
    EXPECT_EQ(player.first_scheduled(), accepted) << "first come, first served";
    for (std::int64_t i : accepted) {
      EXPECT_EQ(player.answers(i), workload.requests[static_cast<std::size_t>(i)].answer_tokens);
    }
    EXPECT_EQ(player.scheduler().tokens_done(), tokens);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      EXPECT_EQ(pools[g].num_used(), 0);
      const GroupUsage& usage = player.scheduler().usage()[g];
      EXPECT_LE(usage.peak_blocks, pools[g].num_blocks());
      freed += usage.freed_blocks;
      EXPECT_TRUE(g > 0 || seed % 8 == 3 || usage.freed_blocks == 0);
    }
    const std::int64_t hit_tokens = player.scheduler().prefix_hit_tokens();
    EXPECT_TRUE(options.prefix_reuse || hit_tokens == 0);
    preemptions += player.scheduler().num_preemptions();
    hits += hit_tokens;
    windowed_hits += groups.size() > 1 ? hit_tokens : 0;
  }
  EXPECT_GT(windowed_hits, 500);
  EXPECT_GT(freed, 1000);
  EXPECT_GT(preemptions, 100);
  EXPECT_GT(hits, 1000);
  EXPECT_GT(refused, 20);
}

TEST(Scheduler, RefusesWhatCanNeverFitAndSaysWhy) {
  const Workload workload = make_workload({
      request(0, 5),
      request(5, 0),   //
      request(31, 2),  // 32 tokens go through the layers: two blocks of 16.
      request(32, 2),  // One more than two blocks.
      request(50, 51),
      request(2147483647, 2147483647),
  });
  BlockPool pool(2, 16);
  SchedulerOptions options = roomy();
  const Scheduler scheduler(workload, one_group(pool), options);
  EXPECT_EQ(scheduler.refusal(0), "prompt_tokens is 0, must be at least 1");
  EXPECT_EQ(scheduler.refusal(1), "answer_tokens is 0, must be at least 1");
  EXPECT_EQ(scheduler.refusal(2), "");
  EXPECT_EQ(scheduler.refusal(3),
            "32 prompt and 2 answer tokens need 3 blocks of 16 tokens, the pool has 2");
  EXPECT_NE(scheduler.refusal(5), "");

  BlockPool large(100, 16);
  options.max_position = 99;
  const Scheduler short_model(workload, one_group(large), options);
  EXPECT_EQ(short_model.refusal(4),
            "50 prompt and 51 answer tokens need 100 positions, the model has 99");
  options.max_position = 100;
  EXPECT_EQ(Scheduler(workload, one_group(large), options).refusal(4), "");
}

TEST(Scheduler, CutsPromptsToTheBudgetThatAnswersLeave) {
  const Workload workload = make_workload({request(4, 9), request(20, 2)});
  BlockPool pool(100, 16);
  SchedulerOptions options = roomy();
  options.token_budget = 8;
  Scheduler scheduler(workload, one_group(pool), options);
  scheduler.add(0);
  scheduler.add(1);
  std::vector<std::vector<std::int32_t>> query_lens;
  for (int i = 0; i < 4; ++i) {
    std::vector<std::int32_t>& lens = query_lens.emplace_back();
    for (const ScheduledRequest& scheduled : scheduler.schedule()) {
      lens.push_back(scheduled.query_len);
    }
    scheduler.complete();
  }
  const std::vector<std::vector<std::int32_t>> expected{{4, 4}, {1, 7}, {1, 7}, {1, 2}};
  EXPECT_EQ(query_lens, expected);
}

TEST(Scheduler, OneTokenPieceOfAPromptStandsWithTheDecodes) {  // F364
  // Budget 8: request 0's prompt of 9 leaves a piece of one token, behind which 2's seven tokens of
  // prompt stand; request 1's only prompt token is a single row too, although admitted later.
  const Workload workload = make_workload({request(9, 1), request(12, 1), request(1, 1)});
  BlockPool pool(100, 16);
  SchedulerOptions options = roomy();
  options.token_budget = 15;
  Scheduler scheduler(workload, one_group(pool), options);
  for (std::int64_t i = 0; i < 3; ++i) scheduler.add(i);
  const auto lens = [&] {
    std::vector<std::pair<std::int64_t, std::int32_t>> result;
    for (const ScheduledRequest& scheduled : scheduler.schedule()) {
      result.emplace_back(scheduled.request, scheduled.query_len);
    }
    scheduler.complete();
    return result;
  };
  using Lens = std::vector<std::pair<std::int64_t, std::int32_t>>;
  EXPECT_EQ(lens(), (Lens{{0, 9}, {1, 6}}));
  EXPECT_EQ(lens(), (Lens{{2, 1}, {1, 6}}));
  EXPECT_EQ(lens(), Lens{});
}

TEST(Scheduler, ReusesWholeBlocksOfAPrefixButNeverThePromptsLastToken) {
  // Equal prompts of exactly two blocks: the second block holds the last token and is computed.
  const Workload workload = make_workload(
      {request(32, 1, 0, 32), request(32, 1, 0, 32), request(33, 1, 0, 32), request(40, 1, 0, 20)});
  BlockPool pool(100, 16);
  Scheduler scheduler(workload, one_group(pool), roomy());
  const auto context_of = [&](std::int64_t i) {
    scheduler.add(i);
    const std::int32_t context_len = scheduler.schedule().at(0).context_len;
    scheduler.complete();
    return context_len;
  };
  EXPECT_EQ(context_of(0), 0);
  EXPECT_EQ(context_of(1), 16);
  EXPECT_EQ(context_of(2), 32);
  EXPECT_EQ(context_of(3), 16) << "the prefix of 20 tokens holds one whole block";
  EXPECT_EQ(scheduler.prefix_hit_tokens(), 64);
}

TEST(Scheduler, SharesABlockOnlyAfterItIsComputed) {
  const Workload workload = make_workload({request(36, 1, 0, 36), request(36, 1, 0, 36)});
  BlockPool pool(100, 16);
  SchedulerOptions options = roomy();
  options.token_budget = 20;
  Scheduler scheduler(workload, one_group(pool), options);
  scheduler.add(0);
  scheduler.add(1);
  EXPECT_EQ(scheduler.schedule().size(), 1u);
  scheduler.complete();
  // 20 tokens of request 0 are computed, one whole block; its next 16 are in the same step.
  const std::vector<ScheduledRequest>& step = scheduler.schedule();
  ASSERT_EQ(step.size(), 2u);
  EXPECT_EQ(step[1].request, 1);
  EXPECT_EQ(step[1].context_len, 16);
}

TEST(Scheduler, PutsTheYoungestBackAndRecomputesItsAnswerSoFar) {
  // Five blocks of 4. Both prompts fit; when both have to grow, one block is left.
  const Workload workload = make_workload({request(8, 8), request(8, 8)});
  BlockPool pool(5, 4);
  SchedulerOptions options = roomy();
  options.prefix_reuse = false;
  Player player(workload, pool, options);
  player.add(0);
  player.step();
  player.add(1);
  player.step();
  EXPECT_EQ(player.scheduler().num_running(), 1) << "no block would be left for the growing one";
  player.run(100);
  EXPECT_EQ(player.scheduler().num_preemptions(), 0);

  BlockPool larger(6, 4);
  Player second(workload, larger, options);
  second.add(0);
  second.add(1);
  second.step();
  EXPECT_EQ(second.scheduler().num_running(), 2);
  for (int i = 0; i < 5; ++i) second.step();  // Both take their last block, then the pool is dry.
  EXPECT_EQ(second.scheduler().num_preemptions(), 1);
  EXPECT_EQ(second.answers(1), 5);
  EXPECT_EQ(second.answers(0), 6);
  second.run(100);
  EXPECT_EQ(second.answers(1), 8);
}

TEST(Scheduler, NobodyOvertakesTheOneThatWaitsForBlocks) {
  const Workload workload = make_workload({request(30, 3), request(60, 1), request(1, 1)});
  BlockPool pool(5, 16);
  Player player(workload, pool, roomy());
  for (std::int64_t i = 0; i < 3; ++i) player.add(i);
  player.run(100);
  EXPECT_EQ(player.first_scheduled(), (std::vector<std::int64_t>{0, 1, 2}));
}

}  // namespace
}  // namespace fovea::engine
