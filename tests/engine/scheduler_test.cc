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
          .prefix_reuse = true};
}

/// Plays the engine: checks every step against what may happen, and what the cache holds.
class Player {
 public:
  Player(const Workload& workload, BlockPool& pool, const SchedulerOptions& options)
      : workload_(workload),
        pool_(pool),
        options_(options),
        scheduler_(workload, pool, options),
        slots_(static_cast<std::size_t>(pool.num_blocks() * pool.block_size()), 0),
        progress_(workload.requests.size()) {}

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
      EXPECT_FALSE(i > 0 && step[i].query_len == 1 && step[i - 1].query_len > 1)
          << "a single row behind longer ones";
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

  std::uint64_t& slot(const ScheduledRequest& scheduled, std::int64_t position) {
    const auto block = static_cast<std::size_t>(position / pool_.block_size());
    return slots_[static_cast<std::size_t>(std::int64_t{scheduled.blocks[block]} *
                                               pool_.block_size() +
                                           position % pool_.block_size())];
  }

  void check_and_write(const ScheduledRequest& scheduled) {
    const RequestSpec& spec = workload_.requests[static_cast<std::size_t>(scheduled.request)];
    Progress& progress = progress_[static_cast<std::size_t>(scheduled.request)];
    ASSERT_GE(scheduled.query_len, 1);
    const std::int64_t end = scheduled.context_len + scheduled.query_len;
    ASSERT_LE(end, spec.prompt_tokens + progress.answers) << "a token that is not known yet";
    ASSERT_LE(end, static_cast<std::int64_t>(scheduled.blocks.size()) * pool_.block_size());
    for (std::int64_t p = 0; p < scheduled.context_len; ++p) {
      ASSERT_EQ(slot(scheduled, p), fingerprint(scheduled.request, p))
          << "request " << scheduled.request << " does not find its token " << p;
    }
    for (std::int64_t p = scheduled.context_len; p < end; ++p) {
      const auto block = scheduled.blocks[static_cast<std::size_t>(p / pool_.block_size())];
      ASSERT_EQ(pool_.ref_count(block), 1) << "writes a block of somebody else";
      slot(scheduled, p) = fingerprint(scheduled.request, p);
    }
    progress.computed = end;
    const bool yields = end == spec.prompt_tokens + progress.answers;
    ASSERT_EQ(scheduled.answer_index, yields ? progress.answers : -1);
    ASSERT_EQ(scheduled.finishes, yields && progress.answers + 1 == spec.answer_tokens);
    answering_.erase(scheduled.request);
    if (!yields) return;
    ++progress.answers;
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
  BlockPool& pool_;
  SchedulerOptions options_;
  Scheduler scheduler_;
  std::vector<std::uint64_t> slots_;  ///< What prefix ends there.
  std::vector<Progress> progress_;
  std::vector<std::int64_t> first_scheduled_;
  std::set<std::int64_t> unfinished_;
  std::set<std::int64_t> answering_;  ///< Yielded an answer last and have one to go.
};

TEST(Scheduler, AnswersEveryRequestOnceOnRandomWorkloadsAndTinyPools) {
  std::int64_t preemptions = 0, hits = 0, refused = 0;
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
    BlockPool pool(pick(30, 150) / block_size, block_size);
    const SchedulerOptions options{.max_num_seqs = pick(1, 8),
                                   .token_budget = pick(1, 2) == 1 ? pick(1, 6) : pick(7, 64),
                                   .max_position = 60,
                                   .vocab_size = 1 + (seed % 2) * 500,
                                   .prefix_reuse = seed % 3 != 0};
    Player player(workload, pool, options);
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
    EXPECT_EQ(pool.num_used(), 0);
    EXPECT_EQ(player.scheduler().tokens_done(), tokens);
    EXPECT_LE(player.scheduler().peak_blocks(), pool.num_blocks());
    EXPECT_TRUE(options.prefix_reuse || player.scheduler().prefix_hit_tokens() == 0);
    preemptions += player.scheduler().num_preemptions();
    hits += player.scheduler().prefix_hit_tokens();
  }
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
  const Scheduler scheduler(workload, pool, options);
  EXPECT_EQ(scheduler.refusal(0), "prompt_tokens is 0, must be at least 1");
  EXPECT_EQ(scheduler.refusal(1), "answer_tokens is 0, must be at least 1");
  EXPECT_EQ(scheduler.refusal(2), "");
  EXPECT_EQ(scheduler.refusal(3),
            "32 prompt and 2 answer tokens need 3 blocks of 16 tokens, the pool has 2");
  EXPECT_NE(scheduler.refusal(5), "");

  BlockPool large(100, 16);
  options.max_position = 99;
  const Scheduler short_model(workload, large, options);
  EXPECT_EQ(short_model.refusal(4),
            "50 prompt and 51 answer tokens need 100 positions, the model has 99");
  options.max_position = 100;
  EXPECT_EQ(Scheduler(workload, large, options).refusal(4), "");
}

TEST(Scheduler, CutsPromptsToTheBudgetThatAnswersLeave) {
  const Workload workload = make_workload({request(4, 9), request(20, 2)});
  BlockPool pool(100, 16);
  SchedulerOptions options = roomy();
  options.token_budget = 8;
  Scheduler scheduler(workload, pool, options);
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
  Scheduler scheduler(workload, pool, options);
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
  Scheduler scheduler(workload, pool, roomy());
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
  Scheduler scheduler(workload, pool, options);
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
