#include <gtest/gtest.h>

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "fovea/block_pool.h"
#include "fovea/error.h"
#include "support/poison.h"

namespace fovea {
namespace {

std::vector<std::int32_t> ids(const BlockTable& table) {
  return {table.blocks().begin(), table.blocks().end()};
}

TEST(BlockTableTest, GrowsByWholeBlocksAndGivesSlots) {
  BlockPool pool(8, 3);
  BlockTable other(pool);
  other.grow_to(1);
  BlockTable table(pool);
  EXPECT_TRUE(table.grow_to(0));
  EXPECT_EQ(table.capacity(), 0);
  EXPECT_TRUE(table.grow_to(4));
  EXPECT_EQ(table.capacity(), 6);
  EXPECT_TRUE(table.grow_to(2));
  EXPECT_EQ(table.capacity(), 6);
  std::vector<std::int64_t> slots(4);
  table.slots(1, slots);
  const std::int64_t a = table.blocks()[0], b = table.blocks()[1];
  EXPECT_EQ(slots, (std::vector<std::int64_t>{a * 3 + 1, a * 3 + 2, b * 3, b * 3 + 1}));
  std::vector<std::int64_t> too_many(7);
  EXPECT_THROW(table.slots(0, too_many), Error);
  EXPECT_THROW(table.slots(3, slots), Error);
  EXPECT_THROW(table.slots(-1, slots), Error);
  EXPECT_THROW(table.grow_to(-1), Error);
}

TEST(BlockTableTest, AFailedGrowthChangesNothing) {
  BlockPool pool(3, 4);
  BlockTable table(pool);
  table.grow_to(4);
  EXPECT_FALSE(table.grow_to(17));
  EXPECT_EQ(table.blocks().size(), 1u);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_TRUE(table.grow_to(12));
}

TEST(BlockTableTest, ShrinkingReleasesTheEndFirst) {
  BlockPool pool(4, 2);
  BlockTable table(pool);
  table.grow_to(8);
  const std::vector<std::int32_t> before = ids(table);
  for (std::size_t i = 0; i < 4; ++i) pool.publish(before[i], {i, 1});
  table.shrink_to(3);
  EXPECT_EQ(ids(table), (std::vector<std::int32_t>{before[0], before[1]}));
  table.clear();
  EXPECT_EQ(pool.num_free(), 4);
  for (const std::size_t i : {3u, 2u, 1u, 0u}) EXPECT_EQ(*pool.allocate(), before[i]);
}

TEST(BlockTableTest, BlocksBeforeAWindowAreReleasedAndStayFindableUntilNeeded) {
  BlockPool pool(4, 4);
  BlockTable table(pool);
  ASSERT_TRUE(table.grow_to(16));
  const std::vector<std::int32_t> blocks(table.blocks().begin(), table.blocks().end());
  const std::int32_t token = 7;
  const BlockHash hash = hash_block({}, std::span(&token, 1));
  ASSERT_TRUE(pool.publish(blocks[0], hash));
  table.release_before(3);
  EXPECT_EQ(pool.num_free(), 0) << "the block still holds position 3";
  table.release_before(11);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(table.capacity(), 16);
  EXPECT_EQ(std::vector(table.blocks().begin(), table.blocks().end()),
            (std::vector{BlockTable::kNoBlock, BlockTable::kNoBlock, blocks[2], blocks[3]}));
  std::vector<std::int64_t> slots(2);
  table.slots(8, slots);
  EXPECT_EQ(slots[0], blocks[2] * 4);
  EXPECT_THROW(table.slots(7, slots), Error);
  EXPECT_THROW(table.make_writable(3), Error);
  EXPECT_TRUE(pool.contains(hash));

  BlockTable fork = table.fork();
  EXPECT_EQ(pool.ref_count(blocks[3]), 2);
  fork.release_before(12);
  EXPECT_EQ(pool.ref_count(blocks[2]), 1);
  fork.clear();
  table.shrink_to(4);
  EXPECT_EQ(pool.num_used(), 0);
  EXPECT_TRUE(table.grow_to(8)) << "behind an entry without a block";
  EXPECT_EQ(table.blocks()[0], BlockTable::kNoBlock);
  EXPECT_EQ(pool.num_used(), 1);
  BlockTable moved(std::move(table));
  moved.release_before(8);
  EXPECT_EQ(pool.num_used(), 0);
}

TEST(BlockTableTest, SkippedEntriesHoldNothing) {
  BlockPool pool(2, 4);
  BlockTable table(pool);
  table.skip(5);
  ASSERT_TRUE(table.grow_to(24));
  EXPECT_EQ(pool.num_used(), 1);
  table.release_before(24);
  EXPECT_EQ(pool.num_used(), 0);
  table.clear();
  EXPECT_TRUE(table.blocks().empty());
}

TEST(BlockTableTest, MovingMovesTheReferencesAndDestructionReturnsThem) {
  BlockPool pool(4, 1);
  {
    BlockTable a(pool);
    a.grow_to(2);
    BlockTable b(std::move(a));
    EXPECT_EQ(b.blocks().size(), 2u);
    BlockTable c(pool);
    c.grow_to(1);
    c = std::move(b);
    EXPECT_EQ(pool.num_used(), 2);
    c = std::move(c);
    EXPECT_EQ(pool.num_used(), 2);
  }
  EXPECT_EQ(pool.num_used(), 0);
}

TEST(BlockTableTest, AForkSharesUntilOneOfThemWrites) {
  BlockPool pool(4, 2);
  BlockTable parent(pool);
  parent.grow_to(4);
  BlockTable child = parent.fork();
  EXPECT_EQ(ids(child), ids(parent));
  EXPECT_EQ(pool.num_used(), 2);
  const auto copy = child.make_writable(3);
  ASSERT_TRUE(copy);
  EXPECT_EQ(copy->src, parent.blocks()[1]);
  EXPECT_EQ(copy->dst, child.blocks()[1]);
  EXPECT_NE(copy->src, copy->dst);
  EXPECT_EQ(child.blocks()[0], parent.blocks()[0]);
  // Both own their last block alone now.
  EXPECT_FALSE(child.make_writable(3));
  EXPECT_FALSE(parent.make_writable(2));
  EXPECT_EQ(pool.num_used(), 3);
  EXPECT_THROW(parent.make_writable(4), Error);
  EXPECT_THROW(parent.make_writable(-1), Error);
}

TEST(BlockTableTest, WithoutAFreeBlockACopyIsRefusedAndNothingChanges) {
  BlockPool pool(1, 2);
  BlockTable parent(pool);
  parent.grow_to(2);
  BlockTable child = parent.fork();
  try {
    child.make_writable(0);
    FAIL() << "no block is free";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
  }
  EXPECT_EQ(ids(child), ids(parent));
  EXPECT_EQ(pool.ref_count(0), 2);
}

TEST(BlockTableTest, APublishedBlockThatIsWrittenIsNoLongerFound) {
  BlockPool pool(2, 2);
  BlockTable table(pool);
  table.grow_to(2);
  const BlockHash hash{1, 2};
  pool.publish(table.blocks()[0], hash);
  EXPECT_FALSE(table.make_writable(1));
  EXPECT_FALSE(pool.find(hash));
  // A shared one stays: the copy is what is written.
  pool.publish(table.blocks()[0], hash);
  BlockTable child(pool);
  child.adopt(*pool.find(hash));
  ASSERT_TRUE(child.make_writable(1));
  const auto found = pool.find(hash);
  ASSERT_TRUE(found);
  EXPECT_EQ(*found, table.blocks()[0]);
  pool.release(*found);
}

/// A table and what was written through it.
struct WrittenSequence {
  BlockTable table;
  std::vector<int> content;
};

/// Every sequence reads what it wrote, and the pool counts the tables that hold a block.
void expect_own_content(const std::vector<WrittenSequence>& sequences,
                        const std::vector<int>& memory, const BlockPool& pool) {
  std::map<std::int32_t, int> owners;
  for (const WrittenSequence& each : sequences) {
    std::set<std::int32_t> own;
    for (const std::int32_t block : each.table.blocks()) {
      ++owners[block];
      ASSERT_TRUE(own.insert(block).second) << "a table lists block " << block << " twice";
    }
    std::vector<std::int64_t> slots(each.content.size());
    each.table.slots(0, slots);
    for (std::size_t p = 0; p < slots.size(); ++p) {
      ASSERT_EQ(memory[static_cast<std::size_t>(slots[p])], each.content[p]) << "position " << p;
    }
  }
  ASSERT_EQ(pool.num_used(), static_cast<std::int64_t>(owners.size()));
  for (const auto& [block, count] : owners) ASSERT_EQ(pool.ref_count(block), count);
}

/// Sequences that fork, grow, shrink and write; `memory` stands for the cache. What a sequence has
/// written must be what it reads, whatever the others do.
TEST(BlockTableTest, RandomForksNeverSeeEachOthersWrites) {
  constexpr std::int64_t kBlocks = 24, kBlockSize = 3;
  BlockPool pool(kBlocks, kBlockSize);
  std::vector<int> memory(kBlocks * kBlockSize, -1);
  std::vector<WrittenSequence> sequences;
  int next_value = 0;
  int copies = 0, refusals = 0;

  /// Makes position writable and writes; false when the pool is out of blocks.
  const auto write = [&](WrittenSequence& sequence, std::int64_t position) {
    try {
      const auto copy = sequence.table.make_writable(position);
      if (copy) {
        ++copies;
        for (std::int64_t r = 0; r < kBlockSize; ++r) {
          memory[static_cast<std::size_t>(copy->dst * kBlockSize + r)] =
              memory[static_cast<std::size_t>(copy->src * kBlockSize + r)];
        }
      }
    } catch (const Error&) {
      ++refusals;
      return;
    }
    std::int64_t slot = 0;
    sequence.table.slots(position, std::span(&slot, 1));
    memory[static_cast<std::size_t>(slot)] = next_value;
    sequence.content[static_cast<std::size_t>(position)] = next_value++;
  };

  for (std::uint64_t step = 0; step < 6000; ++step) {
    const std::int64_t action = test::random_below(11, step, 10);
    if (sequences.empty() || (action == 0 && sequences.size() < 8)) {
      sequences.push_back({BlockTable(pool), {}});
      continue;
    }
    const auto i = static_cast<std::size_t>(
        test::random_below(12, step, static_cast<std::int64_t>(sequences.size())));
    WrittenSequence& sequence = sequences[i];
    const auto length = static_cast<std::int64_t>(sequence.content.size());
    if (action == 1 && sequences.size() < 8) {
      sequences.push_back({sequence.table.fork(), sequence.content});
    } else if (action == 2) {
      sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(i));
    } else if (action == 3 && length > 0) {
      const std::int64_t keep = test::random_below(13, step, length);
      sequence.table.shrink_to(keep);
      sequence.content.resize(static_cast<std::size_t>(keep));
    } else if (action < 8) {
      if (!sequence.table.grow_to(length + 1)) continue;
      sequence.content.push_back(-1);
      const int refused = refusals;
      write(sequence, length);
      if (refusals != refused) sequence.content.pop_back();
    } else if (length > 0) {
      write(sequence, test::random_below(14, step, length));
    }

    SCOPED_TRACE(testing::Message() << "step " << step);
    expect_own_content(sequences, memory, pool);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(copies, 50);
  EXPECT_GT(refusals, 0);
  sequences.clear();
  EXPECT_EQ(pool.num_free(), kBlocks);
}

}  // namespace
}  // namespace fovea
