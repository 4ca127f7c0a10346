// How much of a thread's time is in kernels.
#pragma once

#include <chrono>

namespace fovea {

/// Seconds that this thread has spent in ops and in products with weights, its waiting for other
/// threads included. Of ops on a GPU, which return before they are done, the time to queue them.
inline thread_local double kernel_seconds = 0;

/// Adds its life to kernel_seconds. They do not nest.
class KernelTimer {
 public:
  KernelTimer() = default;
  KernelTimer(const KernelTimer&) = delete;
  KernelTimer& operator=(const KernelTimer&) = delete;
  ~KernelTimer() {
    kernel_seconds += std::chrono::duration<double>(Clock::now() - begin_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace fovea
