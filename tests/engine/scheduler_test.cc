// The scheduler without a model: steps are "computed" by noting which prefix every slot holds.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace fovea::engine {
namespace {

Workload make_workload(std::vector<RequestSpec> requests) {
  return {"test", 7, std::move(requests)};
}

RequestSpec request(std::int32_t prompt, std::int32_t answer, std::int32_t group = -1,
                    std::int32_t prefix = 0) {
  return {0, prompt, answer, group, prefix};
}

SchedulerOptions roomy() {
  return {.max_num_seqs = 8,
          .token_budget = 1000,
          .max_position = 10000,
          .vocab_size = 1000,
          .prefix_reuse = true,
          .drafts = {}};
}

std::vector<GroupBlocks> one_group(BlockPool& pool) { return {{{}, &pool}}; }

/// Plays the engine: checks every step against what may happen, and what the cache holds.
class Player {
 public:
  Player(const Workload& workload, BlockPool& pool, const SchedulerOptions& options)
      : Player(workload, one_group(pool), options) {}
  Player(const Workload& workload, const std::vector<GroupBlocks>& groups,
         const SchedulerOptions& options)
      : workload_(workload),
        groups_(groups),
        block_size_(groups[0].pool->block_size()),
        options_(options),
        scheduler_(workload, groups, options),
        progress_(workload.requests.size()) {
    for (const GroupBlocks& group : groups) {
      slots_.emplace_back(static_cast<std::size_t>(group.pool->num_blocks() * block_size_), 0);
    }
  }

  Scheduler& scheduler() { return scheduler_; }
  const std::vector<std::int64_t>& first_scheduled() const { return first_scheduled_; }
  std::int64_t answers(std::int64_t request) const { return at(request).answers; }

  void add(std::int64_t request) {
    scheduler_.add(request);
    unfinished_.insert(request);
  }

  /// False when nothing was left to do.
  bool step() {
    const std::set<std::int64_t> due = answering_;
    const std::int64_t preemptions = scheduler_.num_preemptions();
    const std::vector<ScheduledRequest>& step = scheduler_.schedule();
    EXPECT_EQ(step.empty(), unfinished_.empty());
    EXPECT_LE(static_cast<std::int64_t>(step.size()), options_.max_num_seqs);
    std::int64_t rows = 0;
    std::set<std::int64_t> seen;
    for (std::size_t i = 0; i < step.size(); ++i) {
      rows += step[i].query_len;
      EXPECT_TRUE(seen.insert(step[i].request).second) << "twice in a step";
      const std::int64_t threshold = 1 + options_.drafts.max_tokens;
      EXPECT_FALSE(i > 0 && step[i].query_len <= threshold && step[i - 1].query_len > threshold)
          << "a decode behind longer ones";
      check_and_write(step[i]);
    }
    EXPECT_LE(rows, options_.token_budget);
    // Answers go on before any prompt does, unless they are put back or too many.
    const bool preempted = scheduler_.num_preemptions() != preemptions;
    for (std::int64_t request : due) {
      if (seen.contains(request)) continue;
      EXPECT_TRUE(preempted || std::ssize(due) > options_.token_budget) << request;
      if (preempted) answering_.erase(request);
    }
    // Within a step single rows stand first, so the order of a step's newcomers says nothing.
    for (std::int64_t request : seen) {
      Progress& progress = progress_[static_cast<std::size_t>(request)];
      if (!progress.started) first_scheduled_.push_back(request);
      progress.started = true;
    }
    check_oldest(seen);
    const bool any = !step.empty();
    scheduler_.complete();
    return any;
  }

  void run(std::int64_t max_steps) {
    std::int64_t steps = 0;
    while (step() && !::testing::Test::HasFailure()) ASSERT_LT(++steps, max_steps);
  }

 private:
  struct Progress {
    std::int64_t computed = 0;
    std::int64_t answers = 0;
    bool started = false;
  };
  const Progress& at(std::int64_t request) const {
    return progress_[static_cast<std::size_t>(request)];
  }

  /// Names the tokens [0, position] of a request.
  std::uint64_t fingerprint(std::int64_t request, std::int64_t position) const {
    std::uint64_t hash = 14695981039346656037u;
    for (std::int64_t k = 0; k <= position; ++k) {
      hash = (hash ^
              static_cast<std::uint64_t>(workload_.token_id(request, k, options_.vocab_size) + 1)) *
             1099511628211u;
    }
    return hash;
  }

  static std::int64_t first_seen(const AttentionVariant& variant, std::int64_t position) {
    std::int64_t first = 0;
    if (variant.window_left >= 0) first = position - variant.window_left;
    if (variant.attention_chunk > 0)
      first = std::max(first, position - position % variant.attention_chunk);
    return std::max<std::int64_t>(0, first);
  }

  /// What the step finds in a group's blocks, and what it leaves there.
  void check_and_write(const ScheduledRequest& scheduled, std::size_t g) {
    const BlockPool& pool = *groups_[g].pool;
    const std::span<const std::int32_t> blocks = scheduled.blocks[g];
    const std::int64_t end = scheduled.context_len + scheduled.query_len;
    ASSERT_LE(end, std::ssize(blocks) * block_size_);
    const auto slot = [&](std::int64_t position) -> std::uint64_t& {
      const std::int64_t block = blocks[static_cast<std::size_t>(position / block_size_)];
      EXPECT_GE(block, 0) << "position " << position << " has no block";
      return slots_[g][static_cast<std::size_t>(block * block_size_ + position % block_size_)];
    };
    const std::int64_t first = first_seen(groups_[g].variant, scheduled.context_len);
    for (std::int64_t i = 0; i < first / block_size_; ++i) {
      ASSERT_EQ(blocks[static_cast<std::size_t>(i)], BlockTable::kNoBlock)
          << "hidden, and not freed";
    }
    for (std::int64_t p = first; p < scheduled.context_len && !HasFailure(); ++p) {
      ASSERT_EQ(slot(p), fingerprint(scheduled.request, p))
          << "request " << scheduled.request << " does not find its token " << p;
    }
    const std::int64_t true_end = scheduled.context_len + scheduled.num_true_rows();
    for (std::int64_t p = scheduled.context_len; p < end; ++p) {
      const auto block = blocks[static_cast<std::size_t>(p / block_size_)];
      ASSERT_EQ(pool.ref_count(block), 1) << "writes a block of somebody else";
      slot(p) = p < true_end ? fingerprint(scheduled.request, p) : ~std::uint64_t{0};
    }
  }
  static bool HasFailure() { return ::testing::Test::HasFailure(); }

  void check_and_write(const ScheduledRequest& scheduled) {
    const RequestSpec& spec = workload_.requests[static_cast<std::size_t>(scheduled.request)];
    Progress& progress = progress_[static_cast<std::size_t>(scheduled.request)];
    ASSERT_GE(scheduled.query_len - scheduled.num_drafts, 1);
    ASSERT_LE(scheduled.num_drafts, options_.drafts.max_tokens);
    ASSERT_LE(scheduled.num_accepted, scheduled.num_drafts);
    const std::int64_t known = spec.prompt_tokens + progress.answers;
    const std::int64_t end = scheduled.context_len + scheduled.query_len;
    ASSERT_LE(end - scheduled.num_drafts, known) << "a token that is not known yet";
    ASSERT_LE(end, spec.computed_tokens()) << "a draft whose answer nobody wants";
    ASSERT_TRUE(scheduled.num_drafts == 0 || scheduled.context_len + 1 == known)
        << "drafts behind a prompt's piece";
    for (std::size_t g = 0; g < groups_.size(); ++g) check_and_write(scheduled, g);
    progress.computed = scheduled.context_len + scheduled.num_true_rows();
    const bool yields = end - scheduled.num_drafts == known;
    ASSERT_EQ(scheduled.answer_index, yields ? progress.answers : -1);
    ASSERT_EQ(scheduled.num_answers(), yields ? 1 + scheduled.num_accepted : 0);
    ASSERT_EQ(scheduled.finishes,
              yields && progress.answers + scheduled.num_answers() == spec.answer_tokens);
    answering_.erase(scheduled.request);
    if (!yields) return;
    progress.answers += scheduled.num_answers();
    if (scheduled.finishes) {
      ASSERT_EQ(unfinished_.erase(scheduled.request), 1u) << "answered twice";
    } else {
      answering_.insert(scheduled.request);
    }
  }

  /// The oldest request that is not done is in every step: nobody starves.
  void check_oldest(const std::set<std::int64_t>& seen) {
    const std::int64_t oldest = unfinished_.empty() ? -1 : *unfinished_.begin();
    if (oldest < 0 || !at(oldest).started) return;
    EXPECT_TRUE(seen.contains(oldest) || seen.empty() || *seen.begin() < oldest)
        << "the oldest request, " << oldest << ", was passed over";
  }

  const Workload& workload_;
  std::vector<GroupBlocks> groups_;
  std::int64_t block_size_;
  SchedulerOptions options_;
  Scheduler scheduler_;
  std::vector<std::vector<std::uint64_t>> slots_;  ///< [groups] What prefix ends there.
  std::vector<Progress> progress_;
  std::vector<std::int64_t> first_scheduled_;
  std::set<std::int64_t> unfinished_;
  std::set<std::int64_t> answering_;  ///< Yielded an answer last and have one to go.
};

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
