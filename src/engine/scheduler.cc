#include "engine/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fovea::engine {

struct Scheduler::Sequence {
  Sequence(std::int64_t request_index, std::int64_t prompt_tokens, BlockPool& pool)
      : request(request_index), known(prompt_tokens), table(pool) {}

  std::int64_t remaining() const { return known - computed; }

  std::int64_t request;
  std::int64_t known;              ///< Prompt tokens and answer tokens so far.
  std::int64_t computed = 0;       ///< Tokens whose rows the cache holds.
  std::int64_t most_computed = 0;  ///< Before any preemption.
  std::int64_t published = 0;      ///< Blocks that others may find.
  std::vector<BlockHash> hashes;   ///< Of the first full blocks; outlive a preemption.
  BlockTable table;
};

Scheduler::Scheduler(const Workload& workload, BlockPool& pool, const SchedulerOptions& options)
    : workload_(workload), pool_(pool), options_(options) {
  block_ids_.resize(static_cast<std::size_t>(pool.block_size()));
}

Scheduler::~Scheduler() = default;

std::int64_t Scheduler::num_blocks_for(std::int64_t tokens) const {
  return (tokens + pool_.block_size() - 1) / pool_.block_size();
}

std::string Scheduler::refusal(std::int64_t request) const {
  const RequestSpec& wanted = spec(request);
  if (wanted.prompt_tokens < 1)
    return fmt::format("prompt_tokens is {}, must be at least 1", wanted.prompt_tokens);
  if (wanted.answer_tokens < 1)
    return fmt::format("answer_tokens is {}, must be at least 1", wanted.answer_tokens);
  const std::int64_t tokens = wanted.computed_tokens();
  if (tokens > options_.max_position) {
    return fmt::format("{} prompt and {} answer tokens need {} positions, the model has {}",
                       wanted.prompt_tokens, wanted.answer_tokens, tokens, options_.max_position);
  }
  if (num_blocks_for(tokens) > pool_.num_blocks()) {
    return fmt::format(
        "{} prompt and {} answer tokens need {} blocks of {} tokens, the pool has {}",
        wanted.prompt_tokens, wanted.answer_tokens, num_blocks_for(tokens), pool_.block_size(),
        pool_.num_blocks());
  }
  return {};
}

void Scheduler::add(std::int64_t request) {
  waiting_.push_back(std::make_unique<Sequence>(request, spec(request).prompt_tokens, pool_));
}

const std::vector<ScheduledRequest>& Scheduler::schedule() {
  picks_.clear();
  budget_ = options_.token_budget;
  const std::int64_t preemptions_before = num_preemptions_;
  // Who is preempted leaves at the end of running_; whoever is picked here is older.
  for (std::size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    if (running_[i]->remaining() == 1 && make_room(i)) pick(*running_[i]);
  }
  const std::size_t num_growing = picks_.size();
  for (const auto& sequence : running_) {
    if (sequence->remaining() > 1 && budget_ > 0) pick(*sequence);
  }
  // Whoever was just put back would be the first to come in again.
  const bool preempted = num_preemptions_ != preemptions_before;
  while (!preempted && budget_ > 0 && admit_next()) pick(*running_.back());

  // A prompt's piece of one row is computed as a decode, so it stands with them.
  std::stable_partition(picks_.begin() + static_cast<std::ptrdiff_t>(num_growing), picks_.end(),
                        [](const Pick& picked) { return picked.query_len == 1; });
  step_.clear();
  for (const auto& [sequence, query_len] : picks_) {
    const RequestSpec& wanted = spec(sequence->request);
    ScheduledRequest& scheduled = step_.emplace_back();
    scheduled.request = sequence->request;
    scheduled.context_len = static_cast<std::int32_t>(sequence->computed);
    scheduled.query_len = static_cast<std::int32_t>(query_len);
    if (query_len == sequence->remaining()) {
      scheduled.answer_index = sequence->known - wanted.prompt_tokens;
    }
    scheduled.finishes = scheduled.answer_index == wanted.answer_tokens - 1;
    scheduled.blocks = sequence->table.blocks();
  }
  peak_blocks_ = std::max(peak_blocks_, pool_.num_used());
  return step_;
}

void Scheduler::pick(Sequence& sequence) {
  picks_.push_back({&sequence, std::min(sequence.remaining(), budget_)});
  budget_ -= picks_.back().query_len;
}

/// A block for the next token of running_[index], if need be from the youngest. False when that was
/// the request itself.
bool Scheduler::make_room(std::size_t index) {
  while (!running_[index]->table.grow_to(running_[index]->known)) {
    preempt_youngest();
    if (index == running_.size()) return false;
  }
  return true;
}

void Scheduler::preempt_youngest() {
  running_.back()->table.clear();
  waiting_.push_front(std::move(running_.back()));
  running_.pop_back();
  ++num_preemptions_;
}

/// Moves the oldest waiting request to running_, with blocks for all its known tokens.
bool Scheduler::admit_next() {
  if (waiting_.empty() || num_running() >= options_.max_num_seqs) return false;
  Sequence& sequence = *waiting_.front();
  adopt_prefix(sequence);
  const auto num_held = static_cast<std::int64_t>(sequence.table.blocks().size());
  const auto num_growing =
      std::count_if(running_.begin(), running_.end(), [this](const auto& other) {
        return num_blocks_for(spec(other->request).computed_tokens()) >
               static_cast<std::int64_t>(other->table.blocks().size());
      });
  if (pool_.num_free() < num_blocks_for(sequence.known) - num_held + num_growing) {
    sequence.table.clear();
    return false;
  }
  sequence.table.grow_to(sequence.known);
  sequence.computed = num_held * pool_.block_size();
  sequence.published = num_held;
  prefix_hit_tokens_ += sequence.computed;
  running_.push_back(std::move(waiting_.front()));
  waiting_.pop_front();
  return true;
}

/// Takes the published blocks that hold the sequence's first tokens, never its last known token:
/// its row has to be computed.
void Scheduler::adopt_prefix(Sequence& sequence) {
  if (!options_.prefix_reuse) return;
  const std::int64_t num_reusable = (sequence.known - 1) / pool_.block_size();
  for (std::int64_t i = 0; i < num_reusable; ++i) {
    extend_hashes(sequence, i + 1);
    const std::optional<std::int32_t> block =
        pool_.find(sequence.hashes[static_cast<std::size_t>(i)]);
    if (!block) return;
    sequence.table.adopt(*block);
  }
}

void Scheduler::extend_hashes(Sequence& sequence, std::int64_t num_blocks) {
  while (static_cast<std::int64_t>(sequence.hashes.size()) < num_blocks) {
    const BlockHash parent = sequence.hashes.empty() ? BlockHash{} : sequence.hashes.back();
    std::int64_t token = static_cast<std::int64_t>(sequence.hashes.size()) * pool_.block_size();
    for (std::int32_t& id : block_ids_) {
      id = workload_.token_id(sequence.request, token++, options_.vocab_size);
    }
    sequence.hashes.push_back(hash_block(parent, block_ids_));
  }
}

void Scheduler::publish_full_blocks(Sequence& sequence) {
  if (!options_.prefix_reuse) return;
  const std::int64_t num_full = sequence.computed / pool_.block_size();
  extend_hashes(sequence, num_full);
  for (; sequence.published < num_full; ++sequence.published) {
    const auto i = static_cast<std::size_t>(sequence.published);
    pool_.publish(sequence.table.blocks()[i], sequence.hashes[i]);
  }
}

void Scheduler::complete() {
  for (const auto& [sequence, query_len] : picks_) {
    sequence->computed += query_len;
    publish_full_blocks(*sequence);
    tokens_done_ += std::max<std::int64_t>(0, sequence->computed - sequence->most_computed);
    sequence->most_computed = std::max(sequence->most_computed, sequence->computed);
    if (sequence->remaining() == 0) ++sequence->known;
  }
  picks_.clear();
  std::erase_if(running_, [this](const auto& sequence) {
    const RequestSpec& wanted = spec(sequence->request);
    return sequence->known - wanted.prompt_tokens == wanted.answer_tokens;
  });
}

}  // namespace fovea::engine
