// OpenMP's team as a thread pool: oneDNN runs on the same team, and two spinning teams would take
// the processors from each other.
#include <omp.h>

#include "core/check.h"
#include "fovea/thread_pool.h"

namespace fovea {
namespace {

class OpenMpThreadPool final : public ThreadPool {
 public:
  explicit OpenMpThreadPool(int num_threads) : num_threads_(num_threads) {}

  int num_threads() const override { return num_threads_; }

  void run(std::int64_t num_tasks, TaskRef fn) override {
    if (num_tasks <= 1 || num_threads_ == 1) {
      for (std::int64_t task = 0; task < num_tasks; ++task) fn(task);
      return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads_)
    for (std::int64_t task = 0; task < num_tasks; ++task) fn(task);
  }

 private:
  int num_threads_;
};

}  // namespace

std::unique_ptr<ThreadPool> make_openmp_thread_pool(int num_threads) {
  FOVEA_CHECK(num_threads >= 0, invalid_argument, "num_threads is {}, but must be at least 0",
              num_threads);
  return std::make_unique<OpenMpThreadPool>(num_threads > 0 ? num_threads
                                                            : num_available_processors());
}

}  // namespace fovea
