#include "engine/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/kv_groups.h"

namespace fovea::engine {
namespace {

bool sees_everything(const GroupBlocks& group) { return keys_before(group.variant) < 0; }

}  // namespace

struct Scheduler::Sequence {
  Sequence(std::int64_t request_index, std::int64_t prompt_tokens,
           const std::vector<GroupBlocks>& groups)
      : request(request_index), known(prompt_tokens) {
    for (const GroupBlocks& group : groups) tables.emplace_back(*group.pool);
  }

  std::int64_t remaining() const { return known - computed; }
  void clear_tables() {
    for (BlockTable& table : tables) table.clear();
  }

  std::int64_t request;
  std::int64_t known;              ///< Prompt tokens and answer tokens so far.
  std::int64_t computed = 0;       ///< Tokens whose rows the caches hold.
  std::int64_t most_computed = 0;  ///< Before any preemption.
  std::int64_t published = 0;      ///< Blocks that others may find.
  std::vector<BlockHash> hashes;   ///< Of the first full blocks; outlive a preemption.
  std::vector<BlockTable> tables;  ///< [groups]
};

Scheduler::Scheduler(const Workload& workload, std::vector<GroupBlocks> groups,
                     const SchedulerOptions& options)
    : workload_(workload),
      groups_(std::move(groups)),
      options_(options),
      block_size_(groups_.front().pool->block_size()),
      block_ids_(static_cast<std::size_t>(block_size_)),
      usage_(groups_.size()) {}

Scheduler::~Scheduler() = default;

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
  for (const GroupBlocks& group : groups_) {
    const std::int64_t needed =
        held_blocks(group.variant, tokens, options_.drafts.max_tokens, block_size_);
    if (needed <= group.pool->num_blocks()) continue;
    return fmt::format(
        "{} prompt and {} answer tokens need {} blocks of {} tokens{}, the pool has {}",
        wanted.prompt_tokens, wanted.answer_tokens, needed, block_size_,
        sees_everything(group) ? "" : " for what a window shows", group.pool->num_blocks());
  }
  return {};
}

void Scheduler::add(std::int64_t request) {
  waiting_.push_back(std::make_unique<Sequence>(request, spec(request).prompt_tokens, groups_));
}

const std::vector<ScheduledRequest>& Scheduler::schedule() {
  picks_.clear();
  budget_ = options_.token_budget;
  const std::int64_t preemptions_before = num_preemptions_;
  free_hidden_blocks();
  pick_decodes();
  pick_prompts();
  // Whoever was just put back would be the first to come in again.
  const bool preempted = num_preemptions_ != preemptions_before;
  while (!preempted && budget_ > 0 && admit_next()) {
    Sequence& sequence = *running_.back();
    pick(sequence, rows_with_room(sequence, std::min(sequence.remaining(), budget_)), 0);
  }
  // A prompt's piece that is as short as a decode is computed as one, so it stands with them.
  std::stable_partition(picks_.begin(), picks_.end(), [this](const Pick& picked) {
    return picked.query_len <= 1 + options_.drafts.max_tokens;
  });
  step_.clear();
  for (const Pick& picked : picks_) step_.push_back(describe(picked));
  measure_usage();
  return step_;
}

/// Blocks that no token from the next one on sees. The step takes new ones only afterwards.
void Scheduler::free_hidden_blocks() {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (sees_everything(groups_[g])) continue;
    const std::int64_t free_before = groups_[g].pool->num_free();
    for (const auto& sequence : running_) {
      sequence->tables[g].release_before(first_needed(groups_[g].variant, sequence->computed));
    }
    usage_[g].freed_blocks += groups_[g].pool->num_free() - free_before;
  }
}

void Scheduler::pick_decodes() {
  const auto is_decode = [](const auto& sequence) { return sequence->remaining() == 1; };
  std::int64_t decodes_behind = std::count_if(running_.begin(), running_.end(), is_decode);
  // Who is preempted leaves at the end of running_; whoever is picked here is older.
  for (std::size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    Sequence& sequence = *running_[i];
    if (!is_decode(running_[i])) continue;
    --decodes_behind;
    const std::int64_t rows = make_room(i, 1 + drafts_for(sequence, decodes_behind));
    if (rows > 0) pick(sequence, rows, rows - 1);
  }
}

/// Drafts whose answers are wanted, and that leave a row for each decode behind and for the oldest
/// request.
std::int64_t Scheduler::drafts_for(const Sequence& sequence, std::int64_t decodes_behind) const {
  const std::int64_t wanted = spec(sequence.request).computed_tokens() - 1 - sequence.computed;
  const bool oldest_reads = running_.front()->remaining() > 1;
  const std::int64_t spare = budget_ - 1 - decodes_behind - (oldest_reads ? 1 : 0);
  return std::max<std::int64_t>(0, std::min({options_.drafts.max_tokens, wanted, spare}));
}

void Scheduler::pick_prompts() {
  for (std::size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.remaining() == 1) continue;
    const std::int64_t wanted = std::min(sequence.remaining(), budget_);
    // Blocks that older prompts take for a step are back in the next: only the oldest insists.
    const std::int64_t rows = i == 0 ? make_room(i, wanted) : rows_with_room(sequence, wanted);
    if (rows > 0) pick(sequence, rows, 0);
  }
}

/// `rows` have room.
void Scheduler::pick(Sequence& sequence, std::int64_t rows, std::int64_t num_drafts) {
  for (BlockTable& table : sequence.tables) table.grow_to(sequence.computed + rows);
  picks_.push_back({&sequence, rows, num_drafts});
  budget_ -= rows;
}

ScheduledRequest Scheduler::describe(const Pick& picked) const {
  const Sequence& sequence = *picked.sequence;
  const std::int64_t known_rows = picked.query_len - picked.num_drafts;
  ScheduledRequest scheduled;
  scheduled.request = sequence.request;
  scheduled.context_len = static_cast<std::int32_t>(sequence.computed);
  scheduled.query_len = static_cast<std::int32_t>(picked.query_len);
  scheduled.num_drafts = static_cast<std::int32_t>(picked.num_drafts);
  scheduled.num_accepted = static_cast<std::int32_t>(options_.drafts.accepted(
      sequence.request, sequence.computed + known_rows, picked.num_drafts));
  const RequestSpec& wanted = spec(sequence.request);
  if (known_rows == sequence.remaining()) {
    scheduled.answer_index = sequence.known - wanted.prompt_tokens;
  }
  scheduled.finishes = scheduled.num_answers() > 0 &&
                       scheduled.answer_index + scheduled.num_answers() == wanted.answer_tokens;
  for (const BlockTable& table : sequence.tables) scheduled.blocks.push_back(table.blocks());
  return scheduled;
}

void Scheduler::measure_usage() {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    std::int64_t unfreed = 0;
    for (const auto& sequence : running_) unfreed += std::ssize(sequence->tables[g].blocks());
    GroupUsage& usage = usage_[g];
    usage.peak_blocks = std::max(usage.peak_blocks, groups_[g].pool->num_used());
    usage.peak_blocks_unfreed = std::max(usage.peak_blocks_unfreed, unfreed);
  }
}

/// Of the next `wanted` rows of a sequence, those that free blocks can take in every group.
std::int64_t Scheduler::rows_with_room(const Sequence& sequence, std::int64_t wanted) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::int64_t room =
        sequence.tables[g].capacity() + groups_[g].pool->num_free() * block_size_;
    wanted = std::min(wanted, room - sequence.computed);
  }
  return wanted;
}

/// rows_with_room of running_[index], at least 1 at the cost of younger requests. 0 when the
/// youngest was the request itself.
std::int64_t Scheduler::make_room(std::size_t index, std::int64_t wanted) {
  std::int64_t rows = 0;
  while ((rows = rows_with_room(*running_[index], wanted)) < 1) {
    preempt_youngest();
    if (index == running_.size()) return 0;
  }
  return rows;
}

void Scheduler::preempt_youngest() {
  Sequence& sequence = *running_.back();
  const auto picked = std::find_if(picks_.begin(), picks_.end(),
                                   [&](const Pick& p) { return p.sequence == &sequence; });
  if (picked != picks_.end()) {
    budget_ += picked->query_len;
    picks_.erase(picked);
  }
  sequence.clear_tables();
  sequence.computed = 0;
  waiting_.push_front(std::move(running_.back()));
  running_.pop_back();
  ++num_preemptions_;
}

/// Moves the oldest waiting request to running_, with blocks for all its known tokens in the groups
/// that see them all.
bool Scheduler::admit_next() {
  if (waiting_.empty() || num_running() >= options_.max_num_seqs) return false;
  Sequence& sequence = *waiting_.front();
  sequence.published = adopt_prefix(sequence);
  sequence.computed = sequence.published * block_size_;
  if (!fits(sequence)) {
    sequence.clear_tables();
    sequence.computed = 0;
    return false;
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (sees_everything(groups_[g])) sequence.tables[g].grow_to(sequence.known);
  }
  prefix_hit_tokens_ += sequence.computed;
  running_.push_back(std::move(waiting_.front()));
  waiting_.pop_front();
  return true;
}

/// Whether the rules of admission let a waiting sequence in.
bool Scheduler::fits(const Sequence& sequence) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const BlockPool& pool = *groups_[g].pool;
    if (sees_everything(groups_[g])) {
      const auto num_growing =
          std::count_if(running_.begin(), running_.end(), [&](const auto& other) {
            return num_blocks_for(spec(other->request).computed_tokens()) >
                   std::ssize(other->tables[g].blocks());
          });
      const std::int64_t needed =
          num_blocks_for(sequence.known) - std::ssize(sequence.tables[g].blocks());
      if (pool.num_free() < needed + num_growing) return false;
    } else {
      std::int64_t held = held_at_most(sequence, g);
      for (const auto& other : running_) held += held_at_most(*other, g);
      if (held > pool.num_blocks()) return false;
    }
  }
  return rows_with_room(sequence, 1) == 1;
}

std::int64_t Scheduler::held_at_most(const Sequence& sequence, std::size_t group) const {
  return held_blocks(groups_[group].variant, spec(sequence.request).computed_tokens(),
                     options_.drafts.max_tokens, block_size_);
}

/// Blocks of the longest prefix that every group can give to the token behind it: all of it where
/// everything is seen, else what that token sees, and its last block at least. Never the
/// sequence's last known token, whose row has to be computed.
std::int64_t Scheduler::longest_prefix(Sequence& sequence) {
  std::int64_t length = (sequence.known - 1) / block_size_;
  const auto has = [&](const GroupBlocks& group, std::int64_t i) {
    return group.pool->contains(sequence.hashes[static_cast<std::size_t>(i)]);
  };
  for (const GroupBlocks& group : groups_) {
    if (!sees_everything(group)) continue;
    std::int64_t found = 0;
    for (; found < length; ++found) {
      extend_hashes(sequence, found + 1);
      if (!has(group, found)) break;
    }
    length = found;
  }
  extend_hashes(sequence, length);
  const auto shortened = [&](const GroupBlocks& group) {
    const std::int64_t first = first_needed(group.variant, length * block_size_) / block_size_;
    for (std::int64_t i = length - 1; i >= std::min(first, length - 1) && i >= 0; --i) {
      if (has(group, i)) continue;
      length = i;
      return true;
    }
    return false;
  };
  // A shorter prefix ends elsewhere, and needs other blocks of each group.
  while (std::any_of(groups_.begin(), groups_.end(), [&](const GroupBlocks& group) {
    return !sees_everything(group) && shortened(group);
  })) {
  }
  return length;
}

/// Takes the published blocks of the longest prefix; returns how many entries that makes.
std::int64_t Scheduler::adopt_prefix(Sequence& sequence) {
  if (!options_.prefix_reuse) return 0;
  const std::int64_t length = longest_prefix(sequence);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    BlockTable& table = sequence.tables[g];
    table.skip(first_needed(groups_[g].variant, length * block_size_) / block_size_);
    for (std::int64_t i = std::ssize(table.blocks()); i < length; ++i) {
      table.adopt(*groups_[g].pool->find(sequence.hashes[static_cast<std::size_t>(i)]));
    }
  }
  return length;
}

void Scheduler::extend_hashes(Sequence& sequence, std::int64_t num_blocks) {
  while (std::ssize(sequence.hashes) < num_blocks) {
    const BlockHash parent = sequence.hashes.empty() ? BlockHash{} : sequence.hashes.back();
    std::int64_t token = std::ssize(sequence.hashes) * block_size_;
    for (std::int32_t& id : block_ids_) {
      id = workload_.token_id(sequence.request, token++, options_.vocab_size);
    }
    sequence.hashes.push_back(hash_block(parent, block_ids_));
  }
}

void Scheduler::publish_full_blocks(Sequence& sequence) {
  if (!options_.prefix_reuse) return;
  const std::int64_t num_full = sequence.computed / block_size_;
  extend_hashes(sequence, num_full);
  for (; sequence.published < num_full; ++sequence.published) {
    const auto i = static_cast<std::size_t>(sequence.published);
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      groups_[g].pool->publish(sequence.tables[g].blocks()[i], sequence.hashes[i]);
    }
  }
}

void Scheduler::complete() {
  for (const Pick& picked : picks_) {
    Sequence& sequence = *picked.sequence;
    const ScheduledRequest scheduled = describe(picked);
    sequence.computed += scheduled.num_true_rows();
    sequence.known += scheduled.num_answers();
    publish_full_blocks(sequence);
    // Wrong drafts: what they wrote is overwritten, blocks that only they needed go back.
    for (BlockTable& table : sequence.tables) table.shrink_to(sequence.known);
    tokens_done_ += std::max<std::int64_t>(0, sequence.computed - sequence.most_computed);
    sequence.most_computed = std::max(sequence.most_computed, sequence.computed);
  }
  picks_.clear();
  std::erase_if(running_, [this](const auto& sequence) {
    const RequestSpec& wanted = spec(sequence->request);
    return sequence->known - wanted.prompt_tokens == wanted.answer_tokens;
  });
}

}  // namespace fovea::engine
