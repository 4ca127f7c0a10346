// Windows and drafts in the scheduler: blocks that are given back, prefixes, several answers a
// step.
#include <vector>

#include "engine/scheduler_player.h"

namespace fovea::engine {
namespace {

TEST(Scheduler, AWindowFreesBlocksBeforeItTakesNewOnes) {
  // A window of 8 tokens over blocks of 4: a decode holds 3 blocks at most, however long it gets.
  const Workload workload = make_workload({request(20, 40)});
  BlockPool all(20, 4), windowed(4, 4);
  SchedulerOptions options = roomy();
  options.token_budget = 4;
  Player player(workload, {{{}, &all}, {{.window_left = 7}, &windowed}}, options);
  ASSERT_EQ(player.scheduler().refusal(0), "");
  player.add(0);
  player.run(100);
  const std::vector<GroupUsage>& usage = player.scheduler().usage();
  EXPECT_EQ(usage[0].peak_blocks, 15);
  EXPECT_EQ(usage[0].freed_blocks, 0);
  EXPECT_LE(usage[1].peak_blocks, 4);
  EXPECT_EQ(usage[1].peak_blocks_unfreed, 15);
  EXPECT_EQ(usage[1].freed_blocks, 12);
  EXPECT_EQ(player.scheduler().num_preemptions(), 0);
}

TEST(Scheduler, APromptsPieceIsAsLongAsTheWindowsBlocksAllow) {
  const Workload workload = make_workload({request(60, 3)});
  BlockPool windowed(4, 4);
  Scheduler scheduler(workload, {{{.window_left = 7}, &windowed}}, roomy());
  ASSERT_EQ(scheduler.refusal(0), "");
  scheduler.add(0);
  EXPECT_EQ(scheduler.schedule().at(0).query_len, 16) << "all four blocks";
  scheduler.complete();
  // The token at 16 sees 9 to 15: two blocks are kept, two are taken.
  const ScheduledRequest& second = scheduler.schedule().at(0);
  EXPECT_EQ(second.context_len, 16);
  EXPECT_EQ(second.query_len, 8);
  EXPECT_EQ(second.blocks[0][1], BlockTable::kNoBlock);
  EXPECT_NE(second.blocks[0][2], BlockTable::kNoBlock) << "position 9 is still seen";

  BlockPool tiny(2, 4);
  EXPECT_EQ(Scheduler(workload, {{{.window_left = 7}, &tiny}}, roomy()).refusal(0),
            "60 prompt and 3 answer tokens need 3 blocks of 4 tokens for what a window shows, the "
            "pool has 2");
}

TEST(Scheduler, APrefixIsReusedAsFarAsEveryGroupCanShowIt) {
  // 40 shared tokens, a window of 8, blocks of 4. What request 0 freed stays findable: the window's
  // first blocks were needed again, its last ones are there.
  const Workload workload =
      make_workload({request(41, 1, 0, 40), request(41, 1, 0, 40), request(24, 1, 0, 24),
                     request(90, 1), request(41, 1, 0, 40)});
  BlockPool all(100, 4), windowed(12, 4);
  Scheduler scheduler(workload, {{{}, &all}, {{.window_left = 7}, &windowed}}, roomy());
  const auto context_of = [&](std::int64_t i) {
    scheduler.add(i);
    const ScheduledRequest first = scheduler.schedule().at(0);
    for (std::int64_t b = 0; b < first.context_len / 4; ++b) {
      EXPECT_NE(first.blocks[0][static_cast<std::size_t>(b)], BlockTable::kNoBlock);
      EXPECT_EQ(first.blocks[1][static_cast<std::size_t>(b)] != BlockTable::kNoBlock,
                b >= (first.context_len - 7) / 4)
          << b;
    }
    scheduler.complete();
    while (!scheduler.schedule().empty()) scheduler.complete();
    return first.context_len;
  };
  EXPECT_EQ(context_of(0), 0);
  EXPECT_EQ(context_of(1), 40);
  EXPECT_EQ(context_of(2), 20) << "the window at 20 was freed by request 0, not forgotten";
  EXPECT_EQ(context_of(3), 0) << "takes all blocks of the windowed group";
  EXPECT_EQ(context_of(4), 0) << "no window is left, though the other group has all 40 tokens";
}

TEST(Scheduler, DraftsYieldSeveralAnswersAndWrongOnesAreRolledBack) {
  const Workload workload = make_workload({request(6, 30)});
  for (const double acceptance : {0.0, 1.0}) {
    SCOPED_TRACE(acceptance);
    BlockPool pool(20, 4);
    SchedulerOptions options = roomy();
    options.drafts = {3, acceptance, 1};
    Scheduler scheduler(workload, one_group(pool), options);
    scheduler.add(0);
    EXPECT_EQ(scheduler.schedule().at(0).num_drafts, 0) << "a prompt";
    scheduler.complete();
    const int first_steps = acceptance == 0 ? 4 : 2;
    for (int i = 0; i < first_steps; ++i) {
      const ScheduledRequest& scheduled = scheduler.schedule().at(0);
      EXPECT_EQ(scheduled.context_len, acceptance == 0 ? 6 + i : 6 + 4 * i);
      EXPECT_EQ(scheduled.query_len, 4);
      EXPECT_EQ(scheduled.num_accepted, acceptance == 0 ? 0 : 3);
      scheduler.complete();
    }
    EXPECT_EQ(pool.num_used(), acceptance == 0 ? 3 : 4) << "blocks of wrong drafts go back";
    int steps = first_steps;
    for (; !scheduler.schedule().empty(); ++steps) scheduler.complete();
    // The last answer token is never read: 29 rows behind the prompt's.
    EXPECT_EQ(steps, acceptance == 0 ? 29 : 8);
    EXPECT_EQ(scheduler.tokens_done(), 35);
  }
}

TEST(Scheduler, DraftsLeaveRowsToDecodesAndBlocksToOthers) {
  const Workload workload = make_workload({request(4, 20), request(4, 20), request(4, 20)});
  BlockPool pool(6, 4);
  SchedulerOptions options = roomy();
  options.token_budget = 12;
  options.drafts = {8, 1.0, 1};
  Player player(workload, pool, options);
  for (std::int64_t i = 0; i < 3; ++i) player.add(i);
  player.run(200);
  for (std::int64_t i = 0; i < 3; ++i) EXPECT_EQ(player.answers(i), 20);
}

}  // namespace
}  // namespace fovea::engine
