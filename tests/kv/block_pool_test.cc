#include "fovea/block_pool.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "fovea/error.h"
#include "support/poison.h"

namespace fovea {
namespace {

BlockHash named(std::uint64_t name) { return {name, ~name}; }

TEST(BlockPoolTest, GivesEachBlockOnceAndThenNone) {
  BlockPool pool(5, 16);
  std::set<std::int32_t> ids;
  for (int i = 0; i < 5; ++i) ids.insert(*pool.allocate());
  EXPECT_EQ(ids, (std::set<std::int32_t>{0, 1, 2, 3, 4}));
  EXPECT_FALSE(pool.allocate());
  EXPECT_EQ(pool.num_free(), 0);
  pool.release(3);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(*pool.allocate(), 3);
}

TEST(BlockPoolTest, AnEmptyPoolAnswersAndBadSizesAreRefused) {
  BlockPool pool(0, 1);
  EXPECT_FALSE(pool.allocate());
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_THROW(BlockPool(-1, 16), Error);
  EXPECT_THROW(BlockPool(4, 0), Error);
  EXPECT_THROW(BlockPool(std::int64_t{1} << 31, 16), Error);
}

TEST(BlockPoolTest, AGrownPoolKeepsWhatItHadAndGivesTheNewIdsLast) {
  BlockPool pool(3, 16);
  const std::int32_t cached = *pool.allocate(), held = *pool.allocate();
  ASSERT_TRUE(pool.publish(cached, named(1)));
  pool.release(cached);
  pool.grow(5);
  EXPECT_EQ(pool.num_blocks(), 5);
  EXPECT_EQ(pool.num_free(), 4);
  EXPECT_EQ(pool.ref_count(held), 1);
  EXPECT_EQ(*pool.allocate(), 2);  // Free before.
  EXPECT_EQ(*pool.allocate(), 3);
  EXPECT_EQ(*pool.allocate(), 4);
  EXPECT_TRUE(pool.contains(named(1)));
  EXPECT_EQ(*pool.allocate(), cached);
  EXPECT_FALSE(pool.allocate());
  EXPECT_THROW(pool.grow(4), Error);
}

TEST(BlockPoolTest, UnownedAndUnknownBlocksAreRefusedWithNothingChanged) {
  BlockPool pool(3, 16);
  const std::int32_t block = *pool.allocate();
  pool.release(block);
  EXPECT_THROW(pool.release(block), Error);  // A second release.
  EXPECT_THROW(pool.retain(block), Error);
  EXPECT_THROW(pool.publish(block, named(1)), Error);
  EXPECT_THROW(pool.unpublish(block), Error);
  for (const std::int32_t id : {-1, 3, 99, std::numeric_limits<std::int32_t>::min()}) {
    EXPECT_THROW(pool.release(id), Error);
    EXPECT_THROW(pool.retain(id), Error);
    EXPECT_THROW(pool.ref_count(id), Error);
    EXPECT_THROW(pool.publish(id, named(1)), Error);
  }
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(BlockPoolTest, APublishedBlockIsFoundUntilItsIdIsNeeded) {
  BlockPool pool(2, 16);
  const std::int32_t a = *pool.allocate();
  EXPECT_TRUE(pool.publish(a, named(1)));
  EXPECT_EQ(pool.find(named(1)), a);
  EXPECT_EQ(pool.ref_count(a), 2);
  EXPECT_FALSE(pool.find(named(2)));
  pool.release(a);
  pool.release(a);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.find(named(1)), a);
  EXPECT_EQ(pool.num_free(), 1);
  pool.release(a);
  // The unused block goes first, the cached one after it.
  EXPECT_NE(*pool.allocate(), a);
  EXPECT_EQ(pool.num_evictions(), 0);
  EXPECT_EQ(*pool.allocate(), a);
  EXPECT_EQ(pool.num_evictions(), 1);
  EXPECT_FALSE(pool.find(named(1)));
  EXPECT_FALSE(pool.is_published(a));
}

TEST(BlockPoolTest, TheLeastRecentlyReleasedCachedBlockGoesFirst) {
  BlockPool pool(4, 16);
  std::vector<std::int32_t> blocks;
  for (std::uint64_t i = 0; i < 4; ++i) {
    blocks.push_back(*pool.allocate());
    pool.publish(blocks.back(), named(i));
  }
  for (const std::size_t i : {2u, 0u, 3u, 1u}) pool.release(blocks[i]);
  // A hit moves block 0 to the end.
  EXPECT_EQ(pool.find(named(0)), blocks[0]);
  pool.release(blocks[0]);
  for (const std::size_t i : {2u, 3u, 1u, 0u}) EXPECT_EQ(*pool.allocate(), blocks[i]);
}

TEST(BlockPoolTest, TheFirstBlockUnderAHashAndTheFirstHashOfABlockStay) {
  BlockPool pool(2, 16);
  const std::int32_t a = *pool.allocate();
  const std::int32_t b = *pool.allocate();
  EXPECT_TRUE(pool.publish(a, named(1)));
  EXPECT_TRUE(pool.publish(a, named(1)));
  EXPECT_FALSE(pool.publish(a, named(2)));
  EXPECT_FALSE(pool.publish(b, named(1)));
  EXPECT_FALSE(pool.find(named(2)));
  pool.release(b);
  EXPECT_EQ(*pool.allocate(), b);
  EXPECT_EQ(pool.num_evictions(), 0);
  pool.release(a);
  EXPECT_EQ(pool.find(named(1)), a);
}

TEST(BlockPoolTest, UnpublishHidesABlockAndFreesItsHash) {
  BlockPool pool(2, 16);
  const std::int32_t a = *pool.allocate();
  const std::int32_t b = *pool.allocate();
  pool.publish(a, named(1));
  pool.unpublish(a);
  EXPECT_FALSE(pool.find(named(1)));
  EXPECT_TRUE(pool.publish(b, named(1)));
  pool.unpublish(a);  // Has nothing left to hide.
  EXPECT_EQ(pool.find(named(1)), b);
}

/// The pool's rules in the plainest form: maps and one vector in order of release.
struct ModelPool {
  std::map<std::int32_t, int> references;
  std::map<std::int32_t, std::uint64_t> name_of;
  std::map<std::uint64_t, std::int32_t> block_of;
  std::vector<std::int32_t> released;
};

TEST(BlockPoolTest, RandomUseAgreesWithANaiveModel) {
  constexpr std::int64_t kBlocks = 12;
  BlockPool pool(kBlocks, 4);
  ModelPool model;
  std::vector<std::int32_t> held;  // One entry per reference.
  std::int64_t evictions = 0;
  const auto drop_reference = [&](std::int32_t block) {
    if (--model.references[block] > 0) return;
    model.references.erase(block);
    if (model.name_of.count(block) > 0) model.released.push_back(block);
  };
  for (std::uint64_t step = 0; step < 20000; ++step) {
    const auto pick = [&](std::uint64_t salt, std::int64_t bound) {
      return test::random_below(salt, step, bound);
    };
    const auto held_index = [&] {
      return static_cast<std::size_t>(pick(2, static_cast<std::int64_t>(held.size())));
    };
    const std::int64_t action = pick(1, 10);
    if (action < 3) {
      const auto block = pool.allocate();
      ASSERT_EQ(block.has_value(), static_cast<std::int64_t>(model.references.size()) < kBlocks);
      if (!block) continue;
      ASSERT_EQ(model.references.count(*block), 0u) << "block " << *block << " has an owner";
      if (model.name_of.count(*block) > 0) {
        ASSERT_EQ(*block, model.released.front()) << "not the least recently released";
        ASSERT_EQ(model.references.size() + model.released.size(),
                  static_cast<std::size_t>(kBlocks))
            << "evicted while an unused block was left";
        model.released.erase(model.released.begin());
        model.block_of.erase(model.name_of[*block]);
        model.name_of.erase(*block);
        ++evictions;
      }
      model.references[*block] = 1;
      held.push_back(*block);
    } else if (action < 5) {
      const auto name = static_cast<std::uint64_t>(pick(3, 20));
      const auto block = pool.find(named(name));
      const auto expected = model.block_of.find(name);
      ASSERT_EQ(block.has_value(), expected != model.block_of.end());
      if (!block) continue;
      ASSERT_EQ(*block, expected->second);
      if (model.references[*block]++ == 0) std::erase(model.released, *block);
      held.push_back(*block);
    } else if (held.empty()) {
      continue;
    } else if (action < 8) {
      const std::size_t i = held_index();
      pool.release(held[i]);
      drop_reference(held[i]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
    } else if (action < 9) {
      const std::int32_t block = held[held_index()];
      pool.retain(block);
      ++model.references[block];
      held.push_back(block);
    } else {
      const std::int32_t block = held[held_index()];
      const auto name = static_cast<std::uint64_t>(pick(3, 20));
      pool.publish(block, named(name));
      if (model.name_of.count(block) == 0 && model.block_of.count(name) == 0) {
        model.name_of[block] = name;
        model.block_of[name] = block;
      }
    }
    ASSERT_EQ(pool.num_used(), static_cast<std::int64_t>(model.references.size()));
    ASSERT_EQ(pool.num_used() + pool.num_free(), kBlocks);
    ASSERT_EQ(pool.num_evictions(), evictions);
    for (std::int32_t block = 0; block < kBlocks; ++block) {
      const auto found = model.references.find(block);
      ASSERT_EQ(pool.ref_count(block), found == model.references.end() ? 0 : found->second);
      ASSERT_EQ(pool.is_published(block), model.name_of.count(block) > 0);
    }
  }
  EXPECT_GT(evictions, 100);
}

std::vector<std::int32_t> tokens_of(std::uint64_t seed, std::int64_t count) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.push_back(
        static_cast<std::int32_t>(test::random_below(seed, static_cast<std::uint64_t>(i), 100000)));
  }
  return tokens;
}

struct Less {
  bool operator()(const BlockHash& a, const BlockHash& b) const {
    return a.high != b.high ? a.high < b.high : a.low < b.low;
  }
};

TEST(HashBlockTest, DependsOnParentOrderLengthAndEveryToken) {
  const std::vector<std::int32_t> tokens = tokens_of(1, 16);
  std::set<BlockHash, Less> hashes;
  std::size_t count = 0;
  const auto add = [&](const BlockHash& parent, std::span<const std::int32_t> ids) {
    const BlockHash hash = hash_block(parent, ids);
    EXPECT_EQ(hash, hash_block(parent, ids));
    hashes.insert(hash);
    ++count;
  };
  add({}, tokens);
  add({1, 0}, tokens);
  add({0, 1}, tokens);
  add(hash_block({}, tokens), tokens);
  for (std::size_t length = 1; length < tokens.size(); ++length)
    add({}, std::span(tokens).first(length));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (int bit = 0; bit < 32; ++bit) {
      std::vector<std::int32_t> changed = tokens;
      changed[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(changed[i]) ^ (1u << bit));
      add({}, changed);
    }
    for (std::size_t j = i + 1; j < tokens.size(); ++j) {
      std::vector<std::int32_t> swapped = tokens;
      std::swap(swapped[i], swapped[j]);
      add({}, swapped);
    }
  }
  // Zeros, of every length: nothing may be absorbed without a trace.
  const std::vector<std::int32_t> zeros(64, 0);
  for (std::size_t length = 1; length <= zeros.size(); ++length)
    add({}, std::span(zeros).first(length));
  EXPECT_EQ(hashes.size(), count);
}

TEST(HashBlockTest, EachHalfAloneTellsManyBlocksApart) {
  std::set<std::uint64_t> high, low;
  BlockHash chain;
  for (std::int32_t i = 0; i < 100000; ++i) {
    const std::int32_t tokens[] = {i, i / 2};
    const BlockHash hash = hash_block({}, tokens);
    chain = hash_block(chain, tokens);
    high.insert(hash.high);
    low.insert(hash.low);
    high.insert(chain.high);
    low.insert(chain.low);
  }
  // Token pair (0, 0) opens the chain too.
  EXPECT_EQ(high.size(), 199999u);
  EXPECT_EQ(low.size(), 199999u);
}

TEST(HashBlockTest, EveryTokenBitMovesAboutHalfOfTheHash) {
  const std::vector<std::int32_t> tokens = tokens_of(5, 8);
  const BlockHash base = hash_block({}, tokens);
  for (const std::size_t i : {0u, 3u, 7u}) {
    for (int bit = 0; bit < 32; ++bit) {
      std::vector<std::int32_t> changed = tokens;
      changed[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(changed[i]) ^ (1u << bit));
      const BlockHash hash = hash_block({}, changed);
      const int moved = std::popcount(hash.high ^ base.high) + std::popcount(hash.low ^ base.low);
      EXPECT_GT(moved, 35) << "token " << i << " bit " << bit;
      EXPECT_LT(moved, 93) << "token " << i << " bit " << bit;
    }
  }
}

}  // namespace
}  // namespace fovea
