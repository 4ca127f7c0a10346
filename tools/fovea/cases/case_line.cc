#include "cases/case_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <sstream>

#include "fovea/error.h"

namespace fovea::cases {
namespace {

template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(ErrorCode::invalid_argument, fmt::format(text, std::forward<Args>(args)...));
}

std::int64_t parse_integer(std::string_view key, std::string_view text, Range range) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < range.min ||
      value > range.max) {
    refuse("case: {} was '{}', must be an integer from {} to {}", key, text, range.min, range.max);
  }
  return value;
}

}  // namespace

CaseLine CaseLine::parse(std::string_view text) {
  std::istringstream stream{std::string(text)};
  std::string op;
  std::string dtype;
  if (!(stream >> op >> dtype)) refuse("case: was '{}', must start with an op and a dtype", text);
  CaseLine line(op, parse_dtype(dtype));
  if (!is_compute_dtype(line.dtype_)) refuse("case: dtype was {}, must be f32, f16 or bf16", dtype);
  for (std::string word; stream >> word;) {
    const std::size_t equals = word.find('=');
    if (equals == 0 || equals == std::string::npos || equals + 1 == word.size()) {
      refuse("case: has '{}', must be key=value", word);
    }
    const std::string key = word.substr(0, equals);
    if (line.find(key) != nullptr) refuse("case: {} is given twice", key);
    line.values_.push_back({key, word.substr(equals + 1)});
  }
  for (const Value& value : line.values_) value.is_read = false;
  return line;
}

std::string CaseLine::to_text() const {
  std::string text = fmt::format("{} {}", op_, name_of(dtype_));
  for (const Value& value : values_) text += fmt::format(" {}={}", value.key, value.text);
  return text;
}

std::string CaseLine::name() const {
  const Value* value = find("name");
  return value == nullptr ? to_text() : value->text;
}

CaseLine& CaseLine::set(std::string_view key, std::string value) {
  values_.push_back({std::string(key), std::move(value)});
  return *this;
}

CaseLine& CaseLine::set(std::string_view key, std::int64_t value) {
  return set(key, std::to_string(value));
}

CaseLine& CaseLine::set(std::string_view key, const std::vector<std::int64_t>& values) {
  return set(key, fmt::format("{}", fmt::join(values, ",")));
}

const CaseLine::Value* CaseLine::find(std::string_view key) const {
  const auto value = std::find_if(values_.begin(), values_.end(),
                                  [key](const Value& candidate) { return candidate.key == key; });
  if (value == values_.end()) return nullptr;
  value->is_read = true;
  return &*value;
}

std::int64_t CaseLine::integer(std::string_view key, std::int64_t fallback, Range range) const {
  const Value* value = find(key);
  return value == nullptr ? fallback : parse_integer(key, value->text, range);
}

std::vector<std::int64_t> CaseLine::integers(std::string_view key,
                                             const std::vector<std::int64_t>& fallback,
                                             Range range) const {
  const Value* value = find(key);
  if (value == nullptr) return fallback;
  std::vector<std::int64_t> values;
  std::istringstream stream(value->text);
  for (std::string item; std::getline(stream, item, ',');) {
    values.push_back(parse_integer(key, item, range));
  }
  return values;
}

std::string CaseLine::word(std::string_view key, std::string_view fallback,
                           const std::vector<std::string_view>& allowed) const {
  const Value* value = find(key);
  if (value == nullptr) return std::string(fallback);
  if (std::find(allowed.begin(), allowed.end(), value->text) == allowed.end()) {
    refuse("case: {} was '{}', must be one of {}", key, value->text, fmt::join(allowed, ", "));
  }
  return value->text;
}

DType CaseLine::dtype_value(std::string_view key, DType fallback) const {
  return parse_dtype(word(key, name_of(fallback), {"f32", "f16", "bf16"}));
}

void CaseLine::check_all_read() const {
  for (const Value& value : values_) {
    if (!value.is_read && value.key != "name") refuse("case: {} is no value of {}", value.key, op_);
  }
}

std::vector<CaseLine> parse_case_lines(std::string_view text) {
  std::vector<CaseLine> lines;
  std::istringstream stream{std::string(text)};
  for (std::string line; std::getline(stream, line);) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") != std::string::npos)
      lines.push_back(CaseLine::parse(line));
  }
  return lines;
}

}  // namespace fovea::cases
