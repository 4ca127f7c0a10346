#include "fovea/block_pool.h"

#include <limits>
#include <utility>

#include "core/check.h"

namespace fovea {
namespace {

std::size_t at(std::int32_t block) { return static_cast<std::size_t>(block); }

/// The anchor of the ring of cached blocks, beside which block b has link b + 1.
constexpr std::int32_t kAnchor = -1;
std::size_t link_of(std::int32_t block) { return static_cast<std::size_t>(block + 1); }

}  // namespace

BlockPool::BlockPool(std::int64_t num_blocks, std::int64_t block_size) : block_size_(block_size) {
  FOVEA_CHECK(block_size >= 1, invalid_argument, "block_size is {}, but must be at least 1",
              block_size);
  links_.assign(1, Link{kAnchor, kAnchor});
  grow(num_blocks);
}

void BlockPool::grow(std::int64_t num_blocks) {
  // The ring's anchor takes one link more.
  constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max() - 1;
  const std::int64_t old = this->num_blocks();
  FOVEA_CHECK(num_blocks >= old && num_blocks <= kMaxBlocks, invalid_argument,
              "num_blocks is {}, but must be in [{}, {}]", num_blocks, old, kMaxBlocks);
  const auto count = static_cast<std::size_t>(num_blocks);
  published_.reserve(count);
  hashes_.resize(count);
  links_.resize(count + 1);
  std::vector<std::int32_t> unused;
  unused.reserve(count);
  for (std::int64_t block = num_blocks - 1; block >= old; --block) {
    unused.push_back(static_cast<std::int32_t>(block));
  }
  unused.insert(unused.end(), unused_.begin(), unused_.end());
  unused_ = std::move(unused);
  ref_counts_.resize(count, 0);
}

std::int64_t BlockPool::num_free() const {
  return static_cast<std::int64_t>(unused_.size()) + num_cached_;
}

void BlockPool::check_id(std::int32_t block, const char* call) const {
  FOVEA_CHECK(block >= 0 && block < num_blocks(), invalid_argument,
              "{}: block is {}, but must be in [0, {})", call, block, num_blocks());
}

void BlockPool::check_referenced(std::int32_t block, const char* call) const {
  check_id(block, call);
  FOVEA_CHECK(ref_counts_[at(block)] > 0, invalid_argument,
              "{}: block {} is free, but must have a reference", call, block);
}

void BlockPool::push_cached(std::int32_t block) {
  const std::int32_t last = links_[link_of(kAnchor)].previous;
  links_[link_of(block)] = {last, kAnchor};
  links_[link_of(last)].next = block;
  links_[link_of(kAnchor)].previous = block;
  ++num_cached_;
}

void BlockPool::take_cached(std::int32_t block) {
  const Link link = links_[link_of(block)];
  links_[link_of(link.previous)].next = link.next;
  links_[link_of(link.next)].previous = link.previous;
  --num_cached_;
}

std::optional<std::int32_t> BlockPool::allocate() {
  std::int32_t block = -1;
  if (!unused_.empty()) {
    block = unused_.back();
    unused_.pop_back();
  } else if (num_cached_ > 0) {
    block = links_[link_of(kAnchor)].next;
    take_cached(block);
    published_.erase(*hashes_[at(block)]);
    hashes_[at(block)].reset();
    ++num_evictions_;
  } else {
    return std::nullopt;
  }
  ref_counts_[at(block)] = 1;
  return block;
}

void BlockPool::retain(std::int32_t block) {
  check_referenced(block, "retain");
  ++ref_counts_[at(block)];
}

void BlockPool::release(std::int32_t block) {
  check_referenced(block, "release");
  if (--ref_counts_[at(block)] > 0) return;
  if (hashes_[at(block)]) {
    push_cached(block);
  } else {
    unused_.push_back(block);
  }
}

std::int32_t BlockPool::ref_count(std::int32_t block) const {
  check_id(block, "ref_count");
  return ref_counts_[at(block)];
}

bool BlockPool::publish(std::int32_t block, const BlockHash& hash) {
  check_referenced(block, "publish");
  std::optional<BlockHash>& own = hashes_[at(block)];
  if (own) return *own == hash;
  if (!published_.emplace(hash, block).second) return false;
  own = hash;
  return true;
}

void BlockPool::unpublish(std::int32_t block) {
  check_referenced(block, "unpublish");
  std::optional<BlockHash>& own = hashes_[at(block)];
  if (!own) return;
  published_.erase(*own);
  own.reset();
}

bool BlockPool::is_published(std::int32_t block) const {
  check_id(block, "is_published");
  return hashes_[at(block)].has_value();
}

std::optional<std::int32_t> BlockPool::find(const BlockHash& hash) {
  const auto found = published_.find(hash);
  if (found == published_.end()) return std::nullopt;
  const std::int32_t block = found->second;
  if (ref_counts_[at(block)]++ == 0) take_cached(block);
  return block;
}

}  // namespace fovea
