#include <sched.h>

#include <atomic>
#include <cerrno>
#include <optional>
#include <thread>
#include <vector>

#include "core/check.h"
#include "fovea/thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fovea {
namespace {

// About 40 to 80 microseconds of pauses: what waking a sleeping thread costs, and far more than the
// gap between two ops of a layer.
constexpr int kSpins = 2000;

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

/// Work is handed over through one word, `state_`: the run's generation, whether it is open, and
/// how many workers are inside. Workers enter an open run by themselves; the caller closes it when
/// no task is left and waits only for those inside, so that a worker that wakes late costs nothing.
class StdThreadPool final : public ThreadPool {
 public:
  explicit StdThreadPool(int num_threads)
      : spins_(num_threads <= num_available_processors() ? kSpins : 0) {
    workers_.reserve(static_cast<std::size_t>(num_threads - 1));
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
  }

  ~StdThreadPool() override {
    state_.fetch_or(kStop, std::memory_order_release);
    state_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int num_threads() const override { return static_cast<int>(workers_.size()) + 1; }

  void run(std::int64_t num_tasks, TaskRef fn) override {
    if (num_tasks <= 0) return;
    if (num_tasks == 1 || workers_.empty()) {
      for (std::int64_t task = 0; task < num_tasks; ++task) fn(task);
      return;
    }
    const std::uint32_t closed = state_.load(std::memory_order_relaxed);
    FOVEA_CHECK((closed & kOpen) == 0, invalid_argument,
                "ThreadPool::run is called from inside a task: it is not reentrant");
    job_.emplace(Job{fn, num_tasks});
    next_.store(0, std::memory_order_relaxed);
    // Nobody is inside, so adding a generation and opening is one plain store.
    state_.store((closed + kGeneration) | kOpen, std::memory_order_release);
    state_.notify_all();

    take_tasks();

    std::uint32_t state = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (int spin = 0; (state & kInside) != 0; ++spin) {
      if (spin < spins_) {
        pause_briefly();
      } else {
        state_.wait(state, std::memory_order_acquire);
      }
      state = state_.load(std::memory_order_acquire);
    }
  }

 private:
  // From the low end: 14 bits that count workers inside, two flags, 16 bits of generation. Were a
  // worker to sleep through exactly 2^16 runs, it would miss one: others do its tasks.
  static constexpr std::uint32_t kInside = (1u << 14) - 1;
  static constexpr std::uint32_t kOpen = 1u << 14;
  static constexpr std::uint32_t kStop = 1u << 15;
  static constexpr std::uint32_t kGeneration = 1u << 16;

  struct Job {
    TaskRef fn;
    std::int64_t num_tasks;
  };

  void take_tasks() {
    const Job job = *job_;
    for (;;) {
      const std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= job.num_tasks) return;
      job.fn(task);
    }
  }

  void work() {
    std::uint32_t done_generation = 0;
    for (;;) {
      std::uint32_t state = wait_for_change(done_generation);
      if ((state & kStop) != 0) return;
      // Enter unless the run was closed meanwhile.
      if (!state_.compare_exchange_strong(state, state + 1, std::memory_order_acq_rel)) continue;
      done_generation = state / kGeneration;
      take_tasks();
      const std::uint32_t left = state_.fetch_sub(1, std::memory_order_acq_rel) - 1;
      if ((left & (kInside | kOpen)) == 0) state_.notify_all();
    }
  }

  /// Returns the state once a run other than `done_generation` is open, or the pool stops.
  std::uint32_t wait_for_change(std::uint32_t done_generation) {
    for (int spin = 0;; ++spin) {
      const std::uint32_t state = state_.load(std::memory_order_acquire);
      const bool fresh = (state & kOpen) != 0 && state / kGeneration != done_generation;
      if (fresh || (state & kStop) != 0) return state;
      if (spin < spins_) {
        pause_briefly();
      } else {
        state_.wait(state, std::memory_order_acquire);
      }
    }
  }

  const int spins_;
  std::vector<std::thread> workers_;
  std::optional<Job> job_;  // Written while no run is open and nobody is inside.
  // Apart, so that taking tasks does not disturb those who watch the state.
  alignas(64) std::atomic<std::uint32_t> state_{0};
  alignas(64) std::atomic<std::int64_t> next_{0};
};

}  // namespace

int num_available_processors() {
  // The kernel's mask may be longer than cpu_set_t; it then answers EINVAL.
  for (int cpus = CPU_SETSIZE; cpus <= (1 << 20); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(cpus));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(cpus));
    const int status = sched_getaffinity(0, bytes, set);
    const int error = errno;
    const int count = status == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
    if (status == 0 || error != EINVAL) break;
  }
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

std::unique_ptr<ThreadPool> make_std_thread_pool(int num_threads) {
  constexpr int kMaxThreads = 1 << 13;  // More than any machine has; fits the pool's counter.
  FOVEA_CHECK(num_threads >= 0 && num_threads <= kMaxThreads, invalid_argument,
              "num_threads is {}, but must be in [0, {}]", num_threads, kMaxThreads);
  return std::make_unique<StdThreadPool>(num_threads == 0 ? num_available_processors()
                                                          : num_threads);
}

}  // namespace fovea
