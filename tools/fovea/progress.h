// How far a run is, on stderr.
#pragma once

#include <chrono>
#include <string>

#include "fovea/engine.h"

namespace fovea::cli {

/// A bar that is redrawn on a terminal; elsewhere a plain line every few seconds and at the end.
class Progress {
 public:
  Progress();
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(const ServeProgress& progress);
  /// Takes the bar away.
  void clear();

  /// "3/8 requests, 5123/9876 tokens, 812 tokens/s, 6 s left".
  static std::string describe(const ServeProgress& progress, double tokens_per_s);
  /// A bar of `width` characters between brackets.
  static std::string bar(double fraction, int width);

 private:
  using Clock = std::chrono::steady_clock;
  void update_rate(Clock::time_point now, std::int64_t tokens_done);

  bool is_terminal_;
  bool is_drawn_ = false;
  bool is_done_ = false;
  Clock::time_point shown_ = Clock::now();
  Clock::time_point counted_ = shown_;
  std::int64_t tokens_counted_ = 0;
  double tokens_per_s_ = 0;  ///< Of late: prompts go by faster than answers.
};

}  // namespace fovea::cli
