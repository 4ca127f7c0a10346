#include "fovea/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "fovea/error.h"

namespace fovea {
namespace {

class ThreadPoolTest : public ::testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, EachTaskRunsOnceAndHasRunWhenRunReturns) {
  const auto pool = make_std_thread_pool(GetParam());
  EXPECT_EQ(pool->num_threads(), GetParam());
  for (const std::int64_t num_tasks : {0, 1, 2, 3, 7, 64, 5000}) {
    // Plain ints: a task that ran twice or too late is a race that ThreadSanitizer sees.
    std::vector<int> calls(static_cast<std::size_t>(num_tasks), 0);
    pool->run(num_tasks, [&](std::int64_t task) { ++calls[static_cast<std::size_t>(task)]; });
    EXPECT_EQ(calls, std::vector<int>(static_cast<std::size_t>(num_tasks), 1));
  }
}

TEST_P(ThreadPoolTest, ManyShortRunsOfAnySizeLoseNothing) {
  const auto pool = make_std_thread_pool(GetParam());
  std::int64_t expected = 0;
  std::vector<std::int64_t> sums(40, 0);
  for (int round = 0; round < 3000; ++round) {
    const std::int64_t num_tasks = round % 40;
    pool->run(num_tasks, [&](std::int64_t task) { sums[static_cast<std::size_t>(task)] += round; });
    expected += num_tasks * round;
  }
  std::int64_t total = 0;
  for (const std::int64_t sum : sums) total += sum;
  EXPECT_EQ(total, expected);
}

TEST_P(ThreadPoolTest, RunsAfterTheWorkersWentToSleep) {
  const auto pool = make_std_thread_pool(GetParam());
  for (int round = 0; round < 10; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::vector<int> calls(17, 0);
    pool->run(17, [&](std::int64_t task) { ++calls[static_cast<std::size_t>(task)]; });
    EXPECT_EQ(calls, std::vector<int>(17, 1));
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, ::testing::Values(1, 2, 3, 8));

TEST(StdThreadPoolTest, SlowTasksRunOnSeveralThreadsAtOnceAlsoWhenTheseSlept) {
  const auto pool = make_std_thread_pool(4);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  std::vector<std::thread::id> ids(8);
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  pool->run(8, [&](std::int64_t task) {
    const int now = ++running;
    int seen = most.load();
    while (seen < now && !most.compare_exchange_weak(seen, now)) {
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    --running;
    ids[static_cast<std::size_t>(task)] = std::this_thread::get_id();
  });
  EXPECT_GT(most.load(), 1);
  EXPECT_LE(most.load(), 4);
  EXPECT_GT(std::set<std::thread::id>(ids.begin(), ids.end()).size(), 1u);
}

TEST(StdThreadPoolTest, RunWaitsForWorkersThatAreSlowerThanTheCaller) {
  const auto pool = make_std_thread_pool(3);
  const auto caller = std::this_thread::get_id();
  for (int round = 0; round < 10; ++round) {
    std::atomic<int> finished{0};
    pool->run(6, [&](std::int64_t) {
      const bool is_caller = std::this_thread::get_id() == caller;
      std::this_thread::sleep_for(std::chrono::milliseconds(is_caller ? 1 : 5));
      ++finished;
    });
    ASSERT_EQ(finished.load(), 6);
  }
}

TEST(StdThreadPoolTest, TheCallerTakesPart) {
  const auto pool = make_std_thread_pool(2);
  std::atomic<bool> caller_seen{false};
  const auto caller = std::this_thread::get_id();
  pool->run(64, [&](std::int64_t) {
    if (std::this_thread::get_id() == caller) caller_seen = true;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  });
  EXPECT_TRUE(caller_seen.load());
}

TEST(StdThreadPoolTest, ANestedRunIsRefused) {
  const auto pool = make_std_thread_pool(2);
  std::atomic<int> refused{0};
  pool->run(4, [&](std::int64_t) {
    try {
      pool->run(4, [](std::int64_t) {});
    } catch (const Error&) {
      ++refused;
    }
  });
  EXPECT_EQ(refused.load(), 4);
}

TEST(StdThreadPoolTest, PoolsComeAndGoWhileWorkersSpinOrSleep) {
  for (int round = 0; round < 50; ++round) {
    const auto pool = make_std_thread_pool(1 + round % 5);
    std::atomic<int> sum{0};
    if (round % 3 != 0) pool->run(round, [&](std::int64_t) { ++sum; });
    EXPECT_EQ(sum.load(), round % 3 != 0 ? round : 0);
  }
}

TEST(StdThreadPoolTest, ZeroThreadsMeansTheProcessorsOfThisProcess) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  EXPECT_EQ(num_available_processors(), CPU_COUNT(&set));
  EXPECT_EQ(make_std_thread_pool(0)->num_threads(), CPU_COUNT(&set));
  EXPECT_THROW(make_std_thread_pool(-1), Error);
}

}  // namespace
}  // namespace fovea
