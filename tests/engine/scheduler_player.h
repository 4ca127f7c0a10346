// The scheduler without a model: steps are "computed" by noting which prefix every slot holds.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "engine/scheduler.h"

namespace fovea::engine {

inline Workload make_workload(std::vector<RequestSpec> requests) {
  return {"test", 7, std::move(requests)};
}

inline RequestSpec request(std::int32_t prompt, std::int32_t answer, std::int32_t group = -1,
                           std::int32_t prefix = 0) {
  return {0, prompt, answer, group, prefix};
}

inline SchedulerOptions roomy() {
  return {.max_num_seqs = 8,
          .token_budget = 1000,
          .max_position = 10000,
          .vocab_size = 1000,
          .prefix_reuse = true,
          .drafts = {}};
}

inline std::vector<GroupBlocks> one_group(BlockPool& pool) { return {{{}, &pool}}; }

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

}  // namespace fovea::engine
