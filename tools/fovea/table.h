// Text tables for a terminal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fovea::cli {

/// Columns aligned by their widest cell: the first to the left, the others to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string to_text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// "label  value" lines under each other.
class Facts {
 public:
  void add(std::string label, std::string value) {
    facts_.push_back({std::move(label), std::move(value)});
  }
  std::string to_text() const;

 private:
  struct Fact {
    std::string label;
    std::string value;
  };
  std::vector<Fact> facts_;
};

/// Three significant digits, without an exponent from 0.001 up: "0.0123", "4.56", "789", "12300".
std::string format_number(double value);
/// "1.25 MiB".
std::string format_bytes(double bytes);
/// "43 s", "2 min 05 s", "1 h 20 min".
std::string format_duration(double seconds);

}  // namespace fovea::cli
