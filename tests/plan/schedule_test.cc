#include <algorithm>
#include <numeric>

#include "plan/plan_testing.h"

namespace fovea::testing {
namespace {

PlanTarget target_of(std::int32_t num_workers, std::int32_t kv_tile = 64) {
  PlanTarget target;
  target.num_workers = num_workers;
  target.decode_kv_tile = kv_tile;
  return target;
}

std::vector<std::int64_t> work_of_workers(const DecodeSchedule& schedule) {
  std::vector<std::int64_t> work;
  for (std::size_t w = 0; w + 1 < schedule.worker_begin.size(); ++w) {
    std::int64_t sum = 0;
    for (auto i = schedule.worker_begin[w]; i < schedule.worker_begin[w + 1]; ++i) {
      const WorkItem& item = schedule.items[std::size_t(i)];
      const auto r = static_cast<std::size_t>(item.request);
      const std::int64_t rows = schedule.query_start_loc[r + 1] - schedule.query_start_loc[r];
      sum += rows * (item.kv_end - item.kv_begin);
    }
    work.push_back(sum);
  }
  return work;
}

double imbalance(const DecodeSchedule& schedule) {
  const auto work = work_of_workers(schedule);
  const auto total = std::accumulate(work.begin(), work.end(), std::int64_t{0});
  const auto most = *std::max_element(work.begin(), work.end());
  return static_cast<double>(most) * static_cast<double>(work.size()) / static_cast<double>(total);
}

/// Items cover each request's keys in order, at tiles, and partials number its items.
void check_schedule(const DecodeSchedule& schedule, const Lens& query_lens, const Lens& seq_lens,
                    const PlanTarget& target) {
  ASSERT_EQ(schedule.seq_lens, seq_lens);
  ASSERT_EQ(schedule.query_start_loc, offsets_of(query_lens));
  ASSERT_EQ(schedule.worker_begin.size(), static_cast<std::size_t>(target.num_workers) + 1);
  ASSERT_EQ(schedule.worker_begin.front(), 0);
  ASSERT_EQ(schedule.worker_begin.back(), static_cast<std::int32_t>(schedule.items.size()));
  ASSERT_TRUE(std::is_sorted(schedule.worker_begin.begin(), schedule.worker_begin.end()));
  ASSERT_EQ(schedule.partial_begin.size(), seq_lens.size() + 1);
  std::size_t next = 0;
  for (std::size_t r = 0; r < seq_lens.size(); ++r) {
    const std::size_t first = next;
    std::int32_t covered = 0;
    for (; next < schedule.items.size(); ++next) {
      const WorkItem& item = schedule.items[next];
      if (item.request != static_cast<std::int32_t>(r)) break;
      ASSERT_EQ(item.kv_begin, covered);
      ASSERT_EQ(item.kv_begin % target.decode_kv_tile, 0);
      const bool whole = item.kv_begin == 0 && item.kv_end == seq_lens[r];
      if (!whole) {
        ASSERT_GE(item.kv_end - item.kv_begin, target.decode_kv_tile);
      }
      covered = item.kv_end;
    }
    const auto count = static_cast<std::int32_t>(next - first);
    ASSERT_EQ(count == 0, query_lens[r] == 0);
    if (count > 0) {
      ASSERT_EQ(covered, seq_lens[r]);
    }
    const std::int32_t partials = count > 1 ? count : 0;
    ASSERT_EQ(schedule.partial_begin[r + 1] - schedule.partial_begin[r], partials);
    for (std::size_t i = first; i < next; ++i) {
      const auto expected =
          count > 1 ? schedule.partial_begin[r] + static_cast<std::int32_t>(i - first) : -1;
      ASSERT_EQ(schedule.items[i].partial, expected);
    }
  }
  ASSERT_EQ(next, schedule.items.size());
}

/// The smallest possible largest share of any contiguous cut, by trying every position.
std::int64_t best_largest_share(const Lens& query_lens, const Lens& seq_lens,
                                const PlanTarget& target) {
  std::vector<std::int64_t> cuts{0};
  for (std::size_t r = 0; r < seq_lens.size(); ++r) {
    const std::int64_t begin = cuts.back();
    for (std::int32_t k = 1; k <= seq_lens[r]; ++k) {
      const bool at_tile =
          k % target.decode_kv_tile == 0 && seq_lens[r] - k >= target.decode_kv_tile;
      if (at_tile || k == seq_lens[r]) cuts.push_back(begin + std::int64_t{k} * query_lens[r]);
    }
  }
  // best[c]: smallest largest share of the workers so far, up to cut c.
  std::vector<std::int64_t> best = cuts;
  for (std::int32_t w = 1; w < target.num_workers; ++w) {
    std::vector<std::int64_t> next = best;
    for (std::size_t c = 0; c < cuts.size(); ++c) {
      for (std::size_t b = 0; b <= c; ++b) {
        next[c] = std::min(next[c], std::max(best[b], cuts[c] - cuts[b]));
      }
    }
    best = next;
  }
  return best.back();
}

TEST(DecodeSchedule, OneLongSequenceIsSharedByAllWorkers) {
  const DecodeSchedule schedule = schedule_decode(Lens{0, 1}, Lens{1024}, target_of(4));
  const std::vector<WorkItem> items{
      {0, 0, 256, 0}, {0, 256, 512, 1}, {0, 512, 768, 2}, {0, 768, 1024, 3}};
  EXPECT_EQ(schedule.items, items);
  EXPECT_EQ(schedule.worker_begin, (Lens{0, 1, 2, 3, 4}));
  EXPECT_EQ(schedule.partial_begin, (Lens{0, 4}));
  EXPECT_EQ(schedule.num_partials(), 4);
}

TEST(DecodeSchedule, EvenBatchesAreNotSplit) {
  const DecodeSchedule schedule =
      schedule_decode(offsets_of(Lens(32, 1)), Lens(32, 1000), target_of(3));
  EXPECT_EQ(schedule.num_partials(), 0);
  EXPECT_LT(imbalance(schedule), 1.04);
  EXPECT_EQ(schedule_decode(Lens{0, 1, 2}, Lens{8192, 8200}, target_of(2)).num_partials(), 0);
}

TEST(DecodeSchedule, ShortSequencesAreNotSplit) {
  const DecodeSchedule schedule = schedule_decode(Lens{0, 1}, Lens{127}, target_of(8));
  EXPECT_EQ(schedule.items, (std::vector<WorkItem>{{0, 0, 127, -1}}));
  EXPECT_EQ(schedule.worker_begin.size(), 9u);
  EXPECT_EQ(schedule_decode(Lens{0, 1}, Lens{128}, target_of(8)).items.size(), 2u);
}

TEST(DecodeSchedule, SequencesWithoutKeysHaveOneEmptyItem) {  // B009, B054
  const Lens query_lens{1, 1, 2, 1};
  for (const Lens& seq_lens : {Lens{0, 300, 0, 0}, Lens{0, 0, 0, 0}}) {
    const DecodeSchedule schedule = schedule_decode(offsets_of(query_lens), seq_lens, target_of(3));
    check_schedule(schedule, query_lens, seq_lens, target_of(3));
    EXPECT_EQ(std::count_if(schedule.items.begin(), schedule.items.end(),
                            [](const WorkItem& item) { return item.kv_begin == item.kv_end; }),
              std::count(seq_lens.begin(), seq_lens.end(), 0));
  }
}

TEST(DecodeSchedule, PaddingHasNoItem) {  // F192
  const DecodeSchedule schedule =
      schedule_decode(offsets_of({1, 0, 0}), Lens{100, 100, 0}, target_of(2));
  EXPECT_EQ(schedule.items.back().request, 0);
  EXPECT_EQ(schedule.partial_begin.size(), 4u);
  EXPECT_TRUE(schedule_decode(Lens{0}, Lens{}, target_of(2)).items.empty());
}

TEST(DecodeSchedule, RandomBatchesAreCoveredAndEven) {
  Random random(11);
  for (int round = 0; round < 6000; ++round) {
    const PlanTarget target =
        target_of(random.pick({1, 2, 3, 7, 16, 132}), random.pick({1, 16, 64}));
    Lens query_lens, seq_lens;
    std::int64_t work = 0, largest_tile = 0;
    for (int i = random.between(1, 20); i > 0; --i) {
      query_lens.push_back(random.one_in(8) ? 0 : random.between(1, 5));
      seq_lens.push_back(random.one_in(8) ? 0 : random.between(1, random.pick({100, 3000, 50000})));
      work += std::int64_t{query_lens.back()} * seq_lens.back();
      largest_tile =
          std::max(largest_tile, std::int64_t{query_lens.back()} * target.decode_kv_tile);
    }
    const DecodeSchedule schedule = schedule_decode(offsets_of(query_lens), seq_lens, target);
    check_schedule(schedule, query_lens, seq_lens, target);
    // Two pieces of one to two tiles are what a border of two shares can be off.
    if (work >= 20 * largest_tile * target.num_workers && work > 0) {
      EXPECT_LT(imbalance(schedule), 1.1)
          << ::testing::PrintToString(query_lens) << ::testing::PrintToString(seq_lens);
    }
  }
}

TEST(DecodeSchedule, NoContiguousCutIsMoreThanTheSlackBetter) {
  Random random(12);
  for (int round = 0; round < 1500; ++round) {
    const PlanTarget target = target_of(random.between(1, 5), random.pick({1, 4, 16}));
    Lens query_lens, seq_lens;
    for (int i = random.between(1, 6); i > 0; --i) {
      query_lens.push_back(random.between(1, 4));
      seq_lens.push_back(random.between(0, 90));
    }
    const DecodeSchedule schedule = schedule_decode(offsets_of(query_lens), seq_lens, target);
    check_schedule(schedule, query_lens, seq_lens, target);
    const auto work = work_of_workers(schedule);
    const auto total = std::accumulate(work.begin(), work.end(), std::int64_t{0});
    const std::int64_t share = (total + target.num_workers - 1) / target.num_workers;
    EXPECT_LE(*std::max_element(work.begin(), work.end()),
              std::max(best_largest_share(query_lens, seq_lens, target), share + share / 32));
  }
}

TEST(DecodeSchedule, BadInputIsNamed) {
  expect_error(ErrorCode::invalid_argument, {"seq_lens[0] is -1"}, [] {
    schedule_decode(Lens{0, 1}, Lens{-1}, {});
  });
  expect_error(ErrorCode::invalid_argument, {"query_start_loc has 2 entries", "3"}, [] {
    schedule_decode(Lens{0, 1}, Lens{1, 1}, {});
  });
  expect_error(ErrorCode::invalid_argument, {"num_workers is 0"}, [] {
    schedule_decode(Lens{0, 1}, Lens{1}, target_of(0));
  });
  expect_error(ErrorCode::invalid_argument, {"decode_kv_tile is 0"}, [] {
    schedule_decode(Lens{0, 1}, Lens{1}, target_of(1, 0));
  });
}

TEST(DecodeSchedule, LengthsNearTheLimitDoNotOverflow) {
  const std::int32_t most = 2147483647;
  const Lens seq_lens(64, most);
  const DecodeSchedule schedule =
      schedule_decode(offsets_of(Lens(64, 1 << 20)), seq_lens, target_of(96));
  check_schedule(schedule, Lens(64, 1 << 20), seq_lens, target_of(96));
  EXPECT_LT(imbalance(schedule), 1.1);
}

TEST(PrefillSchedule, TilesCoverEveryQueryRowOnceLongestFirst) {
  Random random(13);
  for (int round = 0; round < 1000; ++round) {
    Lens query_lens, seq_lens;
    for (int i = random.between(0, 6); i > 0; --i) {
      query_lens.push_back(random.between(0, 200));
      seq_lens.push_back(random.between(0, 300));
    }
    const std::int64_t query_tile = random.pick({1, 16, 64});
    const AttentionVariant variant{.causal = random.one_in(2)};
    const PrefillSchedule schedule =
        schedule_prefill(offsets_of(query_lens), offsets_of(seq_lens), query_tile, variant);
    std::vector<Lens> times(query_lens.size());
    for (std::size_t r = 0; r < query_lens.size(); ++r) times[r].assign(query_lens[r], 0);
    std::int64_t previous = std::numeric_limits<std::int64_t>::max();
    for (const PrefillTile& tile : schedule.tiles) {
      const auto r = static_cast<std::size_t>(tile.request);
      ASSERT_EQ(tile.query_begin % query_tile, 0);
      ASSERT_LE(tile.query_end - tile.query_begin, query_tile);
      ASSERT_LT(tile.query_begin, tile.query_end);
      for (auto q = tile.query_begin; q < tile.query_end; ++q) ++times[r].at(std::size_t(q));
      const std::int64_t last_key =
          variant.causal ? std::max(0, seq_lens[r] - query_lens[r] + tile.query_end) : seq_lens[r];
      const std::int64_t work = last_key * (tile.query_end - tile.query_begin);
      ASSERT_LE(work, previous);
      previous = work;
    }
    for (std::size_t r = 0; r < times.size(); ++r) ASSERT_EQ(times[r], Lens(query_lens[r], 1));
  }
}

TEST(DecodeSchedule, BatchInvariantItemsAreEachRequestsOwn) {
  PlanTarget target = target_of(3);
  target.batch_invariant = true;
  const Lens seq_lens = {1027, 7, 0, 2048, 9};
  const DecodeSchedule schedule = schedule_decode(Lens{0, 1, 3, 4, 5, 5}, seq_lens, target);
  EXPECT_EQ(schedule.items, (std::vector<WorkItem>{{0, 0, 1024, 0},
                                                   {0, 1024, 1027, 1},
                                                   {1, 0, 7, -1},
                                                   {2, 0, 0, -1},
                                                   {3, 0, 1024, 2},
                                                   {3, 1024, 2048, 3}}));
  EXPECT_EQ(schedule.partial_begin, (Lens{0, 2, 2, 2, 4, 4}));
  EXPECT_EQ(schedule.worker_begin, (Lens{0, 3, 5, 6}));
}

TEST(DecodeSchedule, BatchInvariantItemsStartAtTheTileOfTheFirstVisibleKey) {
  PlanTarget target = target_of(2);
  target.batch_invariant = true;
  const DecodeSchedule schedule =
      schedule_decode(Lens{0, 1}, Lens{3000}, target, {.window_left = 1500});
  EXPECT_EQ(schedule.items, (std::vector<WorkItem>{{0, 1472, 2048, 0}, {0, 2048, 3000, 1}}));
}

TEST(PrefillSchedule, RowsWithoutKeysHaveTiles) {  // F084, B007
  const PrefillSchedule schedule = schedule_prefill(Lens{0, 3, 5}, Lens{0, 0, 7}, 8);
  EXPECT_EQ(schedule.tiles, (std::vector<PrefillTile>{{1, 0, 2}, {0, 0, 3}}));
  EXPECT_EQ(schedule.max_query_len, 3);
  EXPECT_EQ(schedule.max_seq_len, 7);
}

TEST(PrefillSchedule, BadInputIsNamed) {
  expect_error(ErrorCode::invalid_argument, {"cu_seqlens_q[1] is -1"}, [] {
    schedule_prefill(Lens{0, -1}, Lens{0, 1}, 8);
  });
  expect_error(ErrorCode::invalid_argument, {"cu_seqlens_k has 1 entries", "2"}, [] {
    schedule_prefill(Lens{0, 1}, Lens{0}, 8);
  });
  expect_error(ErrorCode::invalid_argument, {"query_tile is 0"}, [] {
    schedule_prefill(Lens{0, 1}, Lens{0, 1}, 0);
  });
}

}  // namespace
}  // namespace fovea::testing
