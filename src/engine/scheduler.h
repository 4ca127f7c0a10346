// Which tokens of which requests a step computes, and whose blocks hold them. No kernels, no clock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/drafts.h"
#include "fovea/attention_variant.h"
#include "fovea/block_pool.h"
#include "fovea/engine.h"

namespace fovea::engine {

struct SchedulerOptions {
  std::int64_t max_num_seqs = 1;  ///< Requests that run at once.
  std::int64_t token_budget = 1;  ///< Rows of a step.
  std::int64_t max_position = 0;  ///< Of the model.
  std::int64_t vocab_size = 1;
  bool prefix_reuse = true;
  Drafts drafts = {};
};

/// The blocks of one KV group. All pools have blocks of one size.
struct GroupBlocks {
  AttentionVariant variant;
  BlockPool* pool = nullptr;
};

/// One request's part of a step: tokens [context_len, context_len + query_len) of its prompt and
/// answer are computed, the last num_drafts of which are drafted.
struct ScheduledRequest {
  std::int64_t request = 0;  ///< Workload index.
  std::int32_t context_len = 0;
  std::int32_t query_len = 0;
  std::int32_t num_drafts = 0;
  std::int32_t num_accepted = 0;  ///< Drafts before the first wrong one.
  /// Answer token that the last known row yields, accepted drafts the next ones; -1: the prompt
  /// goes on.
  std::int64_t answer_index = -1;
  bool finishes = false;  ///< The last answer token is among them.
  /// [groups] Valid until complete().
  std::vector<std::span<const std::int32_t>> blocks;

  std::int32_t num_true_rows() const { return query_len - num_drafts + num_accepted; }
  std::int64_t num_answers() const { return answer_index < 0 ? 0 : 1 + num_accepted; }
};

/// What happened to the blocks of a group.
struct GroupUsage {
  std::int64_t peak_blocks = 0;
  std::int64_t peak_blocks_unfreed = 0;  ///< If none were freed before its request ends.
  std::int64_t freed_blocks = 0;         ///< Before their requests ended.
};

/// First come, first served. Every known token (the prompt and the answer so far) is computed once,
/// in order; a request whose last known token is computed yields its next answer token.
///
/// - A request is admitted when blocks for all its known tokens are free, so that only answers
///   grow. One more block stays free for every running request that has to grow, or the next block
///   border would put the new one right back.
/// - In a group with a window or chunks a request holds what later tokens see, and takes blocks
///   step by step. It is admitted when what all running ones hold at most fits together with its
///   own; a prompt's piece is as long as the free blocks allow.
/// - When a growing request finds no block, the youngest running one is put back and starts over,
///   the answer so far being part of its prompt. The oldest never is, so it always gets on. Drafts
///   take what is free and put nobody back.
/// - Nobody overtakes: those that run are always older than those that wait.
class Scheduler {
 public:
  /// `workload` and the pools must outlive it.
  Scheduler(const Workload& workload, std::vector<GroupBlocks> groups,
            const SchedulerOptions& options);
  ~Scheduler();

  /// Why a request can never be served; empty when it can.
  std::string refusal(std::int64_t request) const;
  /// Queues a request that `refusal` has no objection to.
  void add(std::int64_t request);

  /// The next step, at most token_budget rows: requests of up to 1 + max drafts rows first, then
  /// those with more. Empty only when nothing runs or waits.
  const std::vector<ScheduledRequest>& schedule();
  /// The step that schedule() gave is computed: rolls wrong drafts back, publishes full blocks,
  /// yields answers, releases what finished.
  void complete();

  std::int64_t num_waiting() const { return static_cast<std::int64_t>(waiting_.size()); }
  std::int64_t num_running() const { return static_cast<std::int64_t>(running_.size()); }
  std::int64_t num_preemptions() const { return num_preemptions_; }
  std::int64_t prefix_hit_tokens() const { return prefix_hit_tokens_; }
  const std::vector<GroupUsage>& usage() const { return usage_; }  ///< [groups]
  /// Tokens whose rows have been there at least once; recomputation does not count.
  std::int64_t tokens_done() const { return tokens_done_; }

 private:
  struct Sequence;
  struct Pick {
    Sequence* sequence;
    std::int64_t query_len;
    std::int64_t num_drafts;
  };

  void free_hidden_blocks();
  void pick_decodes();
  void pick_prompts();
  std::int64_t drafts_for(const Sequence& sequence, std::int64_t decodes_behind) const;
  void pick(Sequence& sequence, std::int64_t rows, std::int64_t num_drafts);
  std::int64_t rows_with_room(const Sequence& sequence, std::int64_t wanted) const;
  std::int64_t make_room(std::size_t index, std::int64_t wanted);
  void preempt_youngest();
  bool admit_next();
  bool fits(const Sequence& sequence) const;
  std::int64_t longest_prefix(Sequence& sequence);
  std::int64_t adopt_prefix(Sequence& sequence);
  void publish_full_blocks(Sequence& sequence);
  void extend_hashes(Sequence& sequence, std::int64_t num_blocks);
  ScheduledRequest describe(const Pick& picked) const;
  void measure_usage();
  std::int64_t held_at_most(const Sequence& sequence, std::size_t group) const;
  std::int64_t num_blocks_for(std::int64_t tokens) const {
    return (tokens + block_size_ - 1) / block_size_;
  }
  const RequestSpec& spec(std::int64_t request) const {
    return workload_.requests[static_cast<std::size_t>(request)];
  }

  const Workload& workload_;
  std::vector<GroupBlocks> groups_;
  SchedulerOptions options_;
  std::int64_t block_size_;
  std::deque<std::unique_ptr<Sequence>> waiting_;   ///< Oldest first.
  std::vector<std::unique_ptr<Sequence>> running_;  ///< Oldest first, all older than waiting_.
  std::int64_t budget_ = 0;                         ///< Rows that the step can still take.
  std::vector<Pick> picks_;                         ///< The step.
  std::vector<ScheduledRequest> step_;              ///< The same, for the outside.
  std::vector<std::int32_t> block_ids_;             ///< Token ids of a block, to be hashed.
  std::vector<GroupUsage> usage_;                   ///< [groups]
  std::int64_t num_preemptions_ = 0;
  std::int64_t prefix_hit_tokens_ = 0;
  std::int64_t tokens_done_ = 0;
};

}  // namespace fovea::engine
