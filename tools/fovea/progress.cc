#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "table.h"

namespace fovea::cli {
namespace {

// Ten times a second looks alive and costs nothing; a log wants far fewer lines.
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::seconds kLine{5};
/// A step may read two thousand tokens of a prompt, or one token each of a few answers.
constexpr double kRateMemorySeconds = 3;

bool can_redraw() {
  const char* term = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && term != nullptr && std::strcmp(term, "dumb") != 0;
}

double fraction_of(const ServeProgress& progress) {
  if (progress.tokens == 0) return 1.0;
  return static_cast<double>(progress.tokens_done) / static_cast<double>(progress.tokens);
}

}  // namespace

Progress::Progress() : is_terminal_(can_redraw()) {}

std::string Progress::describe(const ServeProgress& progress, double tokens_per_s) {
  const std::string text = fmt::format("{}/{} requests, {}/{} tokens", progress.requests_done,
                                       progress.requests, progress.tokens_done, progress.tokens);
  if (tokens_per_s <= 0) return text;
  const auto left = static_cast<double>(progress.tokens - progress.tokens_done);
  return text + fmt::format(", {} tokens/s, {} left", format_number(tokens_per_s),
                            format_duration(std::max(0.0, left / tokens_per_s)));
}

std::string Progress::bar(double fraction, int width) {
  const int filled = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * width);
  return fmt::format("[{:#<{}}{:-<{}}]", "", filled, "", width - filled);
}

void Progress::update_rate(Clock::time_point now, std::int64_t tokens_done) {
  const double elapsed = std::chrono::duration<double>(now - counted_).count();
  // Preempted requests take tokens back.
  const auto tokens = static_cast<double>(std::max<std::int64_t>(0, tokens_done - tokens_counted_));
  if (elapsed <= 0) return;
  const double weight = tokens_per_s_ > 0 ? 1 - std::exp(-elapsed / kRateMemorySeconds) : 1.0;
  tokens_per_s_ += weight * (tokens / elapsed - tokens_per_s_);
  counted_ = now;
  tokens_counted_ = tokens_done;
}

void Progress::update(const ServeProgress& progress) {
  const Clock::time_point now = Clock::now();
  update_rate(now, progress.tokens_done);
  const bool ends_now = progress.requests_done == progress.requests && !is_done_;
  if (!ends_now && now - shown_ < (is_terminal_ ? Clock::duration(kRedraw) : kLine)) return;
  is_done_ = is_done_ || ends_now;
  shown_ = now;
  const std::string text = describe(progress, tokens_per_s_);
  if (is_terminal_) {
    // \x1b[K erases what a longer line left.
    fmt::print(stderr, "\r{} {}\x1b[K", bar(fraction_of(progress), 24), text);
    is_drawn_ = true;
  } else {
    fmt::print(stderr, "{:3.0f} %  {}\n", std::floor(100 * fraction_of(progress)), text);
  }
  std::fflush(stderr);
}

void Progress::clear() {
  if (!is_drawn_) return;
  fmt::print(stderr, "\r\x1b[K");
  std::fflush(stderr);
  is_drawn_ = false;
}

}  // namespace fovea::cli
