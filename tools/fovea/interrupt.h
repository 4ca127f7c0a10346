// Ctrl-C asks once, then kills.
#pragma once

#include <atomic>

namespace fovea::cli {

/// While one lives, the first SIGINT or SIGTERM only sets the flag; the second ends the process.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  static const std::atomic<bool>& requested();
};

}  // namespace fovea::cli
