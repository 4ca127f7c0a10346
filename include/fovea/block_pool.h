// Who owns which block of a paged cache. Pure bookkeeping: no block's bytes are touched here.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace fovea {

/// Identity of a full block's content: its tokens and everything before them.
struct BlockHash {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  bool operator==(const BlockHash&) const = default;
};

/// Hash of a block that follows `parent` (default-constructed for the first block). 128 bits, so
/// that two different prefixes of a pool's lifetime practically never share one. Blocks that differ
/// in one token alone never do. Not cryptographic: who serves strangers that might construct
/// collisions starts from a secret parent.
BlockHash hash_block(const BlockHash& parent, std::span<const std::int32_t> token_ids);

/// Reference-counted block ids 0 to num_blocks - 1. A published block whose last reference goes
/// stays cached until its id is needed; the least recently released goes first.
class BlockPool {
 public:
  /// Throws Error(invalid_argument) unless num_blocks >= 0 and block_size >= 1.
  BlockPool(std::int64_t num_blocks, std::int64_t block_size);

  /// Adds free ids up to num_blocks - 1. Throws Error(invalid_argument) on fewer than there are.
  void grow(std::int64_t num_blocks);

  std::int64_t num_blocks() const { return static_cast<std::int64_t>(ref_counts_.size()); }
  std::int64_t block_size() const { return block_size_; }
  /// Blocks that allocate() can still give: never used, released, or cached without a reference.
  std::int64_t num_free() const;
  std::int64_t num_used() const { return num_blocks() - num_free(); }
  std::int64_t num_evictions() const { return num_evictions_; }

  /// A block with one reference; nothing when none is free.
  std::optional<std::int32_t> allocate();
  /// One more reference. Throws Error(invalid_argument) on an id that is out of range or free.
  void retain(std::int32_t block);
  /// One reference less. Throws like retain.
  void release(std::int32_t block);
  std::int32_t ref_count(std::int32_t block) const;

  /// Makes a referenced block findable. The first block published under a hash stays the one, and
  /// the first hash of a block stays its own. True when the block is now findable under `hash`.
  bool publish(std::int32_t block, const BlockHash& hash);
  /// Makes a referenced block unfindable, before its content changes.
  void unpublish(std::int32_t block);
  bool is_published(std::int32_t block) const;
  /// The block published under `hash`, with one more reference; nothing when there is none.
  std::optional<std::int32_t> find(const BlockHash& hash);
  /// Whether find would give one; takes no reference and is no use of it.
  bool contains(const BlockHash& hash) const { return published_.contains(hash); }

 private:
  struct Hasher {
    std::size_t operator()(const BlockHash& hash) const {
      return static_cast<std::size_t>(hash.low);
    }
  };
  /// A block's neighbours among the cached ones without a reference.
  struct Link {
    std::int32_t previous;
    std::int32_t next;
  };
  void check_id(std::int32_t block, const char* call) const;
  void check_referenced(std::int32_t block, const char* call) const;
  void push_cached(std::int32_t block);
  void take_cached(std::int32_t block);

  std::int64_t block_size_;
  std::int64_t num_evictions_ = 0;
  std::int64_t num_cached_ = 0;
  std::vector<std::int32_t> ref_counts_;
  std::vector<std::int32_t> unused_;  ///< Free ids without content, last one first.
  std::vector<Link> links_;  ///< A ring in order of release; the first element is its anchor.
  std::vector<std::optional<BlockHash>> hashes_;
  std::unordered_map<BlockHash, std::int32_t, Hasher> published_;
};

/// The blocks of one sequence, in order. Holds one reference of each; movable only. Entries before
/// what a window still sees may be kNoBlock: nobody reads or writes those tokens.
class BlockTable {
 public:
  static constexpr std::int32_t kNoBlock = -1;

  explicit BlockTable(BlockPool& pool) : pool_(&pool) {}
  ~BlockTable() { clear(); }
  BlockTable(BlockTable&& other) noexcept;
  BlockTable& operator=(BlockTable&& other) noexcept;

  std::span<const std::int32_t> blocks() const { return blocks_; }
  /// Tokens that the entries span, those without a block included.
  std::int64_t capacity() const {
    return static_cast<std::int64_t>(blocks_.size()) * pool_->block_size();
  }

  /// Appends a block and takes over the reference that the caller holds, from BlockPool::find.
  void adopt(std::int32_t block) { blocks_.push_back(block); }
  /// Appends `count` entries without a block: a prefix whose end alone will be read.
  void skip(std::int64_t count) {
    blocks_.insert(blocks_.end(), static_cast<std::size_t>(count), kNoBlock);
  }
  /// Allocates until `num_tokens` fit. False, with nothing changed, when the pool lacks the blocks.
  bool grow_to(std::int64_t num_tokens);
  /// Releases the blocks that `num_tokens` tokens do not need, the last one first: of a cached
  /// prefix the end is given up before the start, without which the end cannot be found.
  void shrink_to(std::int64_t num_tokens);
  /// Releases the blocks that lie wholly before `position`, in order, and leaves kNoBlock: no token
  /// of theirs is seen again.
  void release_before(std::int64_t position);
  /// A second table on the same blocks.
  BlockTable fork() const;
  /// What must be copied before `position` may be written: when its block is shared, the table gets
  /// a block of its own. A block that is this table's alone is written in place, and no longer
  /// findable. Throws Error(resource_exhausted) when none is free, Error(invalid_argument) past
  /// capacity() and where the entry has no block.
  struct BlockCopy {
    std::int32_t src;
    std::int32_t dst;
  };
  std::optional<BlockCopy> make_writable(std::int64_t position);
  /// Slot ids of tokens [begin, begin + slots.size()). Throws Error(invalid_argument) past
  /// capacity() and where an entry has no block.
  void slots(std::int64_t begin, std::span<std::int64_t> slots) const;
  void clear();

 private:
  /// Throws Error(invalid_argument) when the entry of `position` has no block.
  std::int32_t block_of(std::int64_t position) const;

  BlockPool* pool_;
  std::vector<std::int32_t> blocks_;
  std::int64_t num_released_ = 0;  ///< The first so many entries have no block.
};

}  // namespace fovea
