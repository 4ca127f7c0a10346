#include <algorithm>
#include <utility>

#include "core/check.h"
#include "fovea/block_pool.h"

namespace fovea {
namespace {

std::int64_t blocks_for(std::int64_t num_tokens, std::int64_t block_size) {
  FOVEA_CHECK(num_tokens >= 0, invalid_argument, "num_tokens is {}, but must not be negative",
              num_tokens);
  return num_tokens / block_size + (num_tokens % block_size != 0);
}

}  // namespace

BlockTable::BlockTable(BlockTable&& other) noexcept
    : pool_(other.pool_),
      blocks_(std::exchange(other.blocks_, {})),
      num_released_(std::exchange(other.num_released_, 0)) {}

BlockTable& BlockTable::operator=(BlockTable&& other) noexcept {
  if (this != &other) {
    clear();
    pool_ = other.pool_;
    blocks_ = std::exchange(other.blocks_, {});
    num_released_ = std::exchange(other.num_released_, 0);
  }
  return *this;
}

bool BlockTable::grow_to(std::int64_t num_tokens) {
  const std::int64_t have = static_cast<std::int64_t>(blocks_.size());
  const std::int64_t need = blocks_for(num_tokens, pool_->block_size());
  if (need - have > pool_->num_free()) return false;
  if (need > have) blocks_.reserve(static_cast<std::size_t>(need));
  for (std::int64_t i = have; i < need; ++i) blocks_.push_back(*pool_->allocate());
  return true;
}

void BlockTable::shrink_to(std::int64_t num_tokens) {
  const auto keep = static_cast<std::size_t>(blocks_for(num_tokens, pool_->block_size()));
  while (blocks_.size() > keep) {
    if (blocks_.back() != kNoBlock) pool_->release(blocks_.back());
    blocks_.pop_back();
  }
  num_released_ = std::min(num_released_, static_cast<std::int64_t>(keep));
}

void BlockTable::release_before(std::int64_t position) {
  const std::int64_t end =
      std::min(position / pool_->block_size(), static_cast<std::int64_t>(blocks_.size()));
  for (; num_released_ < end; ++num_released_) {
    std::int32_t& block = blocks_[static_cast<std::size_t>(num_released_)];
    if (block != kNoBlock) pool_->release(block);
    block = kNoBlock;
  }
}

std::int32_t BlockTable::block_of(std::int64_t position) const {
  const std::int32_t block = blocks_[static_cast<std::size_t>(position / pool_->block_size())];
  FOVEA_CHECK(block != kNoBlock, invalid_argument,
              "position {} lies before what the table still holds", position);
  return block;
}

BlockTable BlockTable::fork() const {
  BlockTable copy(*pool_);
  copy.blocks_.reserve(blocks_.size());
  for (std::int32_t block : blocks_) {
    if (block != kNoBlock) pool_->retain(block);
    copy.blocks_.push_back(block);
  }
  copy.num_released_ = num_released_;
  return copy;
}

std::optional<BlockTable::BlockCopy> BlockTable::make_writable(std::int64_t position) {
  FOVEA_CHECK(position >= 0 && position < capacity(), invalid_argument,
              "position is {}, but must be in [0, {})", position, capacity());
  const std::int32_t block = block_of(position);
  if (pool_->ref_count(block) == 1) {
    pool_->unpublish(block);
    return std::nullopt;
  }
  const std::optional<std::int32_t> own = pool_->allocate();
  FOVEA_CHECK(own.has_value(), resource_exhausted,
              "no block is free for a copy of block {}: all {} are in use", block,
              pool_->num_blocks());
  const BlockCopy copy{block, *own};
  pool_->release(block);
  blocks_[static_cast<std::size_t>(position / pool_->block_size())] = *own;
  return copy;
}

void BlockTable::slots(std::int64_t begin, std::span<std::int64_t> slots) const {
  const auto count = static_cast<std::int64_t>(slots.size());
  FOVEA_CHECK(begin >= 0 && count <= capacity() && begin <= capacity() - count, invalid_argument,
              "the tokens are {} from {}, but the table has room for {}", count, begin, capacity());
  const std::int64_t block_size = pool_->block_size();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t position = begin + i;
    const std::int64_t block = block_of(position);
    slots[static_cast<std::size_t>(i)] = block * block_size + position % block_size;
  }
}

void BlockTable::clear() { shrink_to(0); }

}  // namespace fovea
