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

std::string Progress::describe(const ServeProgress& progress, double elapsed_s) {
  std::string text = fmt::format("{}/{} requests, {}/{} tokens", progress.requests_done,
                                 progress.requests, progress.tokens_done, progress.tokens);
  if (progress.tokens_done == 0 || elapsed_s <= 0) return text;
  const double rate = static_cast<double>(progress.tokens_done) / elapsed_s;
  const auto left = static_cast<double>(progress.tokens - progress.tokens_done);
  return text + fmt::format(", {} tokens/s, {} left", format_number(rate),
                            format_duration(std::max(0.0, left / rate)));
}

std::string Progress::bar(double fraction, int width) {
  const int filled = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * width);
  return fmt::format("[{:#<{}}{:-<{}}]", "", filled, "", width - filled);
}

void Progress::update(const ServeProgress& progress) {
  const Clock::time_point now = Clock::now();
  if (is_terminal_ ? now - last_ < kRedraw : now - last_ < kLine) return;
  last_ = now;
  const std::string text = describe(progress, std::chrono::duration<double>(now - start_).count());
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
