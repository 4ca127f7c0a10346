#include "fovea/paged_kv_cache.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "support/poison.h"

namespace fovea {
namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

/// A byte that tells rows apart.
int mark(std::int64_t block, std::int64_t row) {
  return static_cast<int>(block * 31 + row * 7 + 1) % 251;
}

void fill_rows(const PagedKvCache& cache) {
  for (std::int64_t b = 0; b < cache.num_blocks(); ++b) {
    for (std::int64_t r = 0; r < cache.block_size(); ++r) {
      std::memset(cache.row(b, r), mark(b, r),
                  static_cast<std::size_t>(cache.format().row_bytes()));
    }
  }
}

void expect_rows(const PagedKvCache& cache) {
  for (std::int64_t b = 0; b < cache.num_blocks(); ++b) {
    for (std::int64_t r = 0; r < cache.block_size(); ++r) {
      for (std::int64_t i = 0; i < cache.format().row_bytes(); ++i) {
        ASSERT_EQ(std::to_integer<int>(cache.row(b, r)[i]), mark(b, r))
            << "block " << b << " row " << r << " byte " << i;
      }
    }
  }
}

TEST(PagedKvCacheTest, DefaultsPackRowsAndBlocks) {
  const KvFormat format{DType::bf16, 576};
  const auto cache = PagedKvCache::allocate(format, {.num_blocks = 3, .block_size = 7});
  EXPECT_EQ(format.row_bytes(), 1152);
  EXPECT_EQ(cache.layout().row_stride, 1152);
  EXPECT_EQ(cache.layout().block_stride, 7 * 1152);
  EXPECT_EQ(cache.num_slots(), 21);
  EXPECT_EQ(cache.slot(20), cache.row(2, 6));
  EXPECT_EQ(cache.slot(20) - cache.slot(0), 20 * 1152);
  fill_rows(cache);
  expect_rows(cache);
}

// B029, F006
TEST(PagedKvCacheTest, RowsOfAnyLayoutAreApartAndInsideTheRequiredBytes) {
  const KvFormat format{DType::f16, 5};  // 10 bytes
  const KvCacheLayout layouts[] = {
      {.num_blocks = 4, .block_size = 1},
      {.num_blocks = 3, .block_size = 5, .row_stride = 14},
      {.num_blocks = 3, .block_size = 5, .block_stride = 50 + 4096, .storage_offset = 6},
      {.num_blocks = 1, .block_size = 64, .row_stride = 10, .block_stride = 10},
      // Token-major: the rows of one number of all blocks lie together.
      {.num_blocks = 6, .block_size = 4, .row_stride = 60, .block_stride = 10},
      {.num_blocks = 6, .block_size = 4, .row_stride = 72, .block_stride = 12, .storage_offset = 2},
      {.num_blocks = 0, .block_size = 16},
  };
  for (const KvCacheLayout& layout : layouts) {
    const std::int64_t bytes = PagedKvCache::required_bytes(format, layout);
    // Exactly the required bytes, so that AddressSanitizer sees one too many.
    std::vector<std::uint16_t> memory(static_cast<std::size_t>(bytes / 2));
    test::poison_bytes(memory.data(), bytes);
    const auto cache = PagedKvCache::view(memory.data(), format, layout);
    const auto* base = reinterpret_cast<const std::byte*>(memory.data());
    fill_rows(cache);
    expect_rows(cache);
    std::set<const std::byte*> owned;
    for (std::int64_t slot = 0; slot < cache.num_slots(); ++slot) {
      for (std::int64_t i = 0; i < 10; ++i) owned.insert(cache.slot(slot) + i);
    }
    EXPECT_EQ(static_cast<std::int64_t>(owned.size()), 10 * cache.num_slots());
    for (std::int64_t i = 0; i < bytes; ++i) {
      if (owned.count(base + i) == 0) {
        ASSERT_EQ(base[i], test::kPoison) << i;
      }
    }
  }
}

// B030
TEST(PagedKvCacheTest, TwoLayersInOneBufferDoNotTouchEachOther) {
  const KvFormat format{DType::f32, 3};
  const std::int64_t row = format.row_bytes();
  KvCacheLayout layer0{.num_blocks = 4, .block_size = 2, .block_stride = 4 * row};
  KvCacheLayout layer1 = layer0;
  layer1.storage_offset = 2 * row;
  std::vector<float> memory(
      static_cast<std::size_t>(PagedKvCache::required_bytes(format, layer1) / 4));
  const auto cache0 = PagedKvCache::view(memory.data(), format, layer0);
  const auto cache1 = PagedKvCache::view(memory.data(), format, layer1);
  fill_rows(cache0);
  for (std::int64_t slot = 0; slot < cache1.num_slots(); ++slot) {
    std::memset(cache1.slot(slot), 0, static_cast<std::size_t>(row));
  }
  expect_rows(cache0);
  cache1.copy_block(0, 3);
  expect_rows(cache0);
}

TEST(PagedKvCacheTest, CopyBlockMovesRowsAndLeavesGapsAndOtherBlocks) {
  const KvFormat format{DType::bf16, 3};
  const KvCacheLayout layout{.num_blocks = 3, .block_size = 4, .row_stride = 8, .block_stride = 40};
  std::vector<std::uint16_t> memory(60);
  const auto cache = PagedKvCache::view(memory.data(), format, layout);
  std::memset(memory.data(), 0x11, 2 * memory.size());
  test::poison_bytes(cache.row(0, 0), 40);
  fill_rows(cache);
  cache.copy_block(2, 0);
  for (std::int64_t r = 0; r < 4; ++r) {
    EXPECT_EQ(std::memcmp(cache.row(0, r), cache.row(2, r), 6), 0);
    EXPECT_EQ(std::to_integer<int>(cache.row(1, r)[0]), mark(1, r));
    EXPECT_TRUE(test::still_poisoned(cache.row(0, r) + 6, 2));
  }
  cache.copy_block(1, 1);
  EXPECT_THROW(cache.copy_block(0, 3), Error);
  EXPECT_THROW(cache.copy_block(-1, 0), Error);
}

TEST(PagedKvCacheTest, CopiesAreViewsOfTheSameMemoryThatKeepItAlive) {
  PagedKvCache copy;
  {
    const auto cache = PagedKvCache::allocate({DType::f32, 4}, {.num_blocks = 2, .block_size = 3});
    copy = cache;
    fill_rows(cache);
  }
  expect_rows(copy);
}

// B035, B037, B039: the first offset beyond 32 bits, and slot ids beyond 2^31 / row.
TEST(PagedKvCacheTest, OffsetsAre64Bit) {
  const KvFormat format{DType::bf16, 576};
  const std::int64_t num_blocks = 60000;
  const std::int64_t bytes =
      PagedKvCache::required_bytes(format, {.num_blocks = num_blocks, .block_size = 64});
  EXPECT_EQ(bytes, num_blocks * 64 * 1152);
  // Reserved, not committed: only the pages that are touched exist.
  void* memory = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const auto cache =
      PagedKvCache::view(memory, format, {.num_blocks = num_blocks, .block_size = 64});
  EXPECT_EQ(cache.offset(58255, 0), std::int64_t{58255} * 64 * 1152);
  EXPECT_GT(cache.offset(58255, 0), std::int64_t{1} << 32);
  const std::int64_t slots[] = {0, (std::int64_t{1} << 31) / 576 + 1, 58255 * 64,
                                cache.num_slots() - 1};
  for (const std::int64_t slot : slots)
    std::memset(cache.slot(slot), static_cast<int>(slot % 251), 1152);
  for (const std::int64_t slot : slots) {
    EXPECT_EQ(cache.slot(slot), static_cast<std::byte*>(memory) + slot * 1152);
    EXPECT_EQ(std::to_integer<int>(cache.slot(slot)[1151]), static_cast<int>(slot % 251));
  }
  munmap(memory, static_cast<std::size_t>(bytes));
}

TEST(PagedKvCacheTest, AHugeBlockStrideNeedsNoMemoryBetweenBlocks) {
  const KvFormat format{DType::f32, 8};
  const KvCacheLayout layout{.num_blocks = 3001, .block_size = 1, .block_stride = 1 << 22};
  const std::int64_t bytes = PagedKvCache::required_bytes(format, layout);
  void* memory = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const auto cache = PagedKvCache::view(memory, format, layout);
  EXPECT_EQ(cache.slot(3000) - static_cast<std::byte*>(memory), std::int64_t{3000} << 22);
  std::memset(cache.slot(3000), 1, 32);
  munmap(memory, static_cast<std::size_t>(bytes));
}

struct BadLayout {
  const char* argument;  ///< What the message must name.
  KvFormat format;
  KvCacheLayout layout;
};

TEST(PagedKvCacheTest, BadFormatsAndLayoutsAreRefusedByName) {
  const KvFormat good{DType::bf16, 4};  // 8 bytes
  const BadLayout cases[] = {
      {"format.dtype", {DType::i8, 4}, {.num_blocks = 1, .block_size = 1}},
      {"format.row_elements", {DType::f32, 0}, {.num_blocks = 1, .block_size = 1}},
      {"format.row_elements", {DType::f32, -4}, {.num_blocks = 1, .block_size = 1}},
      {"format.row_elements", {DType::f32, kHuge}, {.num_blocks = 1, .block_size = 1}},
      {"num_blocks", good, {.num_blocks = -1, .block_size = 1}},
      {"block_size", good, {.num_blocks = 1, .block_size = 0}},
      {"block_size", good, {.num_blocks = 1, .block_size = -16}},
      {"row_stride", good, {.num_blocks = 1, .block_size = 2, .row_stride = 6}},
      {"row_stride", good, {.num_blocks = 1, .block_size = 2, .row_stride = 9}},
      {"row_stride", good, {.num_blocks = 1, .block_size = 2, .row_stride = -8}},
      {"block_stride", good, {.num_blocks = 2, .block_size = 2, .block_stride = 14}},
      {"block_stride", good, {.num_blocks = 2, .block_size = 2, .block_stride = -16}},
      {"block_stride", good, {.num_blocks = 2, .block_size = 2, .block_stride = 17}},
      {"overlap", good, {.num_blocks = 3, .block_size = 2, .row_stride = 16, .block_stride = 8}},
      {"storage_offset", good, {.num_blocks = 1, .block_size = 1, .storage_offset = -2}},
      {"storage_offset", good, {.num_blocks = 1, .block_size = 1, .storage_offset = 3}},
      {"64 bits", good, {.num_blocks = std::int64_t{1} << 40, .block_size = std::int64_t{1} << 40}},
      {"64 bits", good, {.num_blocks = 3, .block_size = 1, .block_stride = kHuge - 1}},
      {"64 bits", good, {.num_blocks = 1, .block_size = 1, .storage_offset = kHuge - 1}},
      {"64 bits", good, {.num_blocks = 1, .block_size = kHuge}},
  };
  alignas(8) std::byte memory[64];
  for (const BadLayout& bad : cases) {
    for (const bool foreign : {false, true}) {
      try {
        if (foreign) {
          PagedKvCache::view(memory, bad.format, bad.layout);
        } else {
          PagedKvCache::allocate(bad.format, bad.layout);
        }
        ADD_FAILURE() << bad.argument << " was accepted";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(bad.argument), std::string::npos) << error.what();
      }
    }
  }
}

TEST(PagedKvCacheTest, ColumnsAreTheSameRowsButNarrower) {
  const PagedKvCache cache = PagedKvCache::allocate(
      {DType::bf16, 12}, {.num_blocks = 3, .block_size = 4, .row_stride = 32, .storage_offset = 2});
  const PagedKvCache columns = cache.columns(5, 7);
  EXPECT_EQ(columns.format(), (KvFormat{DType::bf16, 7}));
  EXPECT_EQ(columns.num_slots(), cache.num_slots());
  for (std::int64_t slot = 0; slot < cache.num_slots(); ++slot) {
    EXPECT_EQ(columns.slot(slot), cache.slot(slot) + 10);
  }
  EXPECT_EQ(columns.columns(2, 1).row(2, 3), cache.row(2, 3) + 14);
  EXPECT_EQ(columns.layout().storage_offset, 12);
  for (const auto& [first, count] : {std::pair{-1, 3}, {0, 13}, {12, 1}, {3, 0}, {6, -2}}) {
    EXPECT_THROW(cache.columns(first, count), Error) << first << ", " << count;
  }
}

TEST(PagedKvCacheTest, ForeignMemoryMustBePresentAndAligned) {
  alignas(8) std::byte memory[64];
  EXPECT_THROW(PagedKvCache::view(nullptr, {DType::f32, 4}, {.num_blocks = 1, .block_size = 1}),
               Error);
  EXPECT_THROW(PagedKvCache::view(memory + 2, {DType::f32, 4}, {.num_blocks = 1, .block_size = 1}),
               Error);
  EXPECT_NO_THROW(
      PagedKvCache::view(memory + 2, {DType::f16, 4}, {.num_blocks = 1, .block_size = 1}));
  EXPECT_NO_THROW(PagedKvCache::view(nullptr, {DType::f32, 4}, {.num_blocks = 0, .block_size = 1}));
}

}  // namespace
}  // namespace fovea
