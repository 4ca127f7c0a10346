#include "fovea/paged_kv_cache.h"
#include "plan/plan_testing.h"

namespace fovea::testing {
namespace {

constexpr std::int64_t kOlderCap = 128 * 1024;

std::int64_t unaligned_rows(std::int64_t max_model_len, std::int64_t max_num_seqs,
                            std::int64_t block_size, std::int64_t cap) {
  WorkspaceRowsInput input;
  input.max_model_len = max_model_len;
  input.max_num_seqs = max_num_seqs;
  input.block_size = block_size;
  input.cap = cap;
  input.align = false;
  return workspace_rows(input);
}

TEST(WorkspaceRows, LongestOfTwoNeedsUpToTheCap) {  // F069, F070, F323
  EXPECT_EQ(WorkspaceRowsInput{}.cap, 64 * 1024);
  struct Case {
    std::int64_t max_model_len, max_num_seqs, block_size, rows, rows_with_older_cap;
  };
  const Case cases[] = {
      {1024, 16, 16, 8192, 8192},           // 8 * 1024
      {100, 256, 16, 16384, 16384},         // 4 * 256 * 16
      {8192, 256, 16, 65536, 65536},        // both caps allow 8 * 8192
      {10000, 256, 16, 65536, 80000},       //
      {163840, 256, 64, 65536, kOlderCap},  //
      {1, 1, 1, 8, 8},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(unaligned_rows(c.max_model_len, c.max_num_seqs, c.block_size, 64 * 1024), c.rows);
    EXPECT_EQ(unaligned_rows(c.max_model_len, c.max_num_seqs, c.block_size, kOlderCap),
              c.rows_with_older_cap);
  }
}

TEST(WorkspaceRows, OneBlockPerSequenceOrAnError) {  // F072
  expect_error(ErrorCode::invalid_argument, {"cap", "131072", "262144", "16384"},
               [] { unaligned_rows(4096, 16384, 16, kOlderCap); });
  EXPECT_EQ(unaligned_rows(4096, 8192, 16, kOlderCap), kOlderCap);
}

TEST(WorkspaceRows, AlignedToBlocksAndTurns) {  // F071
  Random random(71);
  for (int round = 0; round < 2000; ++round) {
    WorkspaceRowsInput input;
    input.max_model_len = random.between(1, 20000);
    input.max_num_seqs = random.between(1, 600);
    input.block_size = random.pick({1, 7, 16, 64, 100});
    input.cap = random.pick({64, 1000, 65536});
    input.context_ranks = random.between(1, 5);
    input.interleave = random.pick({1, 4, 16});
    input.one_alignment_per_sequence = random.one_in(2);
    const std::int64_t rows = workspace_rows(input);
    EXPECT_EQ(rows % input.block_size, 0);
    EXPECT_EQ(rows % input.context_ranks, 0);
    if (input.context_ranks > 1) {
      EXPECT_EQ(rows % (input.context_ranks * input.interleave), 0);
    }
    EXPECT_GE(rows, input.block_size * (input.one_alignment_per_sequence ? input.max_num_seqs : 1));
  }
}

TEST(WorkspaceRows, BothAlignedPoliciesOfAManySequenceEngine) {
  WorkspaceRowsInput input{.max_model_len = 4096, .max_num_seqs = 16384, .block_size = 16};
  EXPECT_EQ(workspace_rows(input), 16384 * 16);
  input.one_alignment_per_sequence = false;
  EXPECT_EQ(workspace_rows(input), 65536);
  input.block_size = 100;
  EXPECT_EQ(workspace_rows(input), 65600);
}

TEST(WorkspaceRows, GatherAreaOfContextRanksIsOneShareMore) {  // F076
  EXPECT_EQ(allocated_workspace_rows(65536, 1), 65536);
  EXPECT_EQ(allocated_workspace_rows(65536, 2), 98304);
  EXPECT_EQ(allocated_workspace_rows(65536, 4), 81920);
  expect_error(ErrorCode::invalid_argument, {"workspace_rows is 65536", "3"},
               [] { allocated_workspace_rows(65536, 3); });
}

TEST(WorkspaceRows, BytesOfTheDefaultCap) {  // F073
  const std::int64_t latent_row = KvFormat{DType::bf16, 512 + 64}.row_bytes();
  EXPECT_EQ(65536 * latent_row, std::int64_t{72} << 20);
  const std::int64_t expanded_row = bytes_of(DType::bf16, 192 * 128);
  EXPECT_EQ(65536 * expanded_row, std::int64_t{3} << 30);
}

TEST(WorkspaceRows, CapacitiesOutOfRangeAreNamed) {
  const WorkspaceRowsInput good{.max_model_len = 10, .max_num_seqs = 1, .block_size = 1};
  const auto expect_named = [](const char* name, const WorkspaceRowsInput& input) {
    expect_error(ErrorCode::invalid_argument, {name}, [&] { workspace_rows(input); });
  };
  EXPECT_NO_THROW(workspace_rows(good));
  WorkspaceRowsInput bad = good;
  bad.max_model_len = 0;
  expect_named("max_model_len is 0", bad);
  bad = good;
  bad.max_num_seqs = -1;
  expect_named("max_num_seqs is -1", bad);
  bad = good;
  bad.block_size = 0;
  expect_named("block_size is 0", bad);
  bad = good;
  bad.cap = 0;
  expect_named("cap is 0", bad);
  bad = good;
  bad.context_ranks = 0;
  expect_named("context_ranks is 0", bad);
  bad = good;
  bad.interleave = 0;
  expect_named("interleave is 0", bad);
  bad = good;
  bad.max_num_seqs = 1 << 20;
  bad.block_size = 1 << 20;
  expect_named("max_num_seqs is 1048576", bad);
}

}  // namespace
}  // namespace fovea::testing
