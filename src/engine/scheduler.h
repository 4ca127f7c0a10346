// Which tokens of which requests a step computes, and whose blocks hold them. No kernels, no clock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/block_pool.h"
#include "fovea/engine.h"

namespace fovea::engine {

struct SchedulerOptions {
  std::int64_t max_num_seqs = 1;  ///< Requests that run at once.
  std::int64_t token_budget = 1;  ///< Rows of a step.
  std::int64_t max_position = 0;  ///< Of the model.
  std::int64_t vocab_size = 1;
  bool prefix_reuse = true;
};

/// One request's part of a step: tokens [context_len, context_len + query_len) of its prompt and
/// answer are computed.
struct ScheduledRequest {
  std::int64_t request = 0;  ///< Workload index.
  std::int32_t context_len = 0;
  std::int32_t query_len = 0;
  /// Answer token that the last row yields; -1: the prompt goes on.
  std::int64_t answer_index = -1;
  bool finishes = false;                 ///< That answer token is the last one.
  std::span<const std::int32_t> blocks;  ///< Valid until complete().
};

/// First come, first served. Every known token (the prompt and the answer so far) is computed once,
/// in order; a request whose last known token is computed yields its next answer token.
///
/// - A request is admitted when blocks for all its known tokens are free, so that only answers
/// grow.
///   One more block stays free for every running request that has to grow, or the next block border
///   would put the new one right back.
/// - When a growing request finds no block, the youngest running one is put back and starts over,
///   the answer so far being part of its prompt. The oldest never is, so it always gets on.
/// - Nobody overtakes: those that run are always older than those that wait.
class Scheduler {
 public:
  /// `workload` must outlive it.
  Scheduler(const Workload& workload, BlockPool& pool, const SchedulerOptions& options);
  ~Scheduler();

  /// Why a request can never be served; empty when it can.
  std::string refusal(std::int64_t request) const;
  /// Queues a request that `refusal` has no objection to.
  void add(std::int64_t request);

  /// The next step, at most token_budget rows: requests with one row first, then those with more.
  /// Empty only when nothing runs or waits.
  const std::vector<ScheduledRequest>& schedule();
  /// The step that schedule() gave is computed: publishes full blocks, yields answers, releases
  /// what finished.
  void complete();

  std::int64_t num_waiting() const { return static_cast<std::int64_t>(waiting_.size()); }
  std::int64_t num_running() const { return static_cast<std::int64_t>(running_.size()); }
  std::int64_t num_preemptions() const { return num_preemptions_; }
  std::int64_t prefix_hit_tokens() const { return prefix_hit_tokens_; }
  std::int64_t peak_blocks() const { return peak_blocks_; }
  /// Tokens whose rows have been there at least once; recomputation does not count.
  std::int64_t tokens_done() const { return tokens_done_; }

 private:
  struct Sequence;
  struct Pick {
    Sequence* sequence;
    std::int64_t query_len;
  };

  void pick(Sequence& sequence);
  bool make_room(std::size_t index);
  void preempt_youngest();
  bool admit_next();
  void adopt_prefix(Sequence& sequence);
  void publish_full_blocks(Sequence& sequence);
  void extend_hashes(Sequence& sequence, std::int64_t num_blocks);
  std::int64_t num_blocks_for(std::int64_t tokens) const;
  const RequestSpec& spec(std::int64_t request) const {
    return workload_.requests[static_cast<std::size_t>(request)];
  }

  const Workload& workload_;
  BlockPool& pool_;
  SchedulerOptions options_;
  std::deque<std::unique_ptr<Sequence>> waiting_;   ///< Oldest first.
  std::vector<std::unique_ptr<Sequence>> running_;  ///< Oldest first, all older than waiting_.
  std::int64_t budget_ = 0;                         ///< Rows that the step can still take.
  std::vector<Pick> picks_;                         ///< The step.
  std::vector<ScheduledRequest> step_;              ///< The same, for the outside.
  std::vector<std::int32_t> block_ids_;             ///< Token ids of a block, to be hashed.
  std::int64_t num_preemptions_ = 0;
  std::int64_t prefix_hit_tokens_ = 0;
  std::int64_t peak_blocks_ = 0;
  std::int64_t tokens_done_ = 0;
};

}  // namespace fovea::engine
