#include "table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace fovea::cli {

std::string Table::to_text() const {
  std::vector<std::size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line = fmt::format("  {:<{}}", row[0], widths[0]);
    for (std::size_t c = 1; c < row.size(); ++c) line += fmt::format("  {:>{}}", row[c], widths[c]);
    text += line + '\n';
  }
  return text;
}

std::string Facts::to_text() const {
  std::size_t width = 0;
  for (const Fact& fact : facts_) width = std::max(width, fact.label.size());
  std::string text;
  for (const Fact& fact : facts_) {
    text += fmt::format("  {:<{}}  {}\n", fact.label, width, fact.value);
  }
  return text;
}

std::string format_number(double value) {
  const double magnitude = std::abs(value);
  if (magnitude == 0) return "0";
  if (!std::isfinite(value)) return fmt::format("{}", value);
  if (magnitude < 1e-3) return fmt::format("{:.2e}", value);
  const int digits = std::clamp(2 - static_cast<int>(std::floor(std::log10(magnitude))), 0, 5);
  return fmt::format("{:.{}f}", value, digits);
}

std::string format_bytes(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{} {}", format_number(bytes), kUnits[unit]);
}

std::string format_duration(double seconds) {
  const auto total = static_cast<std::int64_t>(std::llround(seconds));
  if (total < 60) return fmt::format("{} s", total);
  if (total < 3600) return fmt::format("{} min {:02} s", total / 60, total % 60);
  return fmt::format("{} h {:02} min", total / 3600, total % 3600 / 60);
}

}  // namespace fovea::cli
