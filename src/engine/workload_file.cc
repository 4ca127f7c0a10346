// Workloads from files. What a file says is not trusted: every error names file, line and field.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "fovea/engine.h"

namespace fovea {
namespace {

constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
// Longer than any sane request line; what a hostile file may make one message hold.
constexpr std::size_t kMaxLine = 64 * 1024;
constexpr std::size_t kMaxQuoted = 40;

std::string excerpt(std::string_view text) {
  std::string result = "'";
  for (char c : text.substr(0, kMaxQuoted)) result += c >= ' ' && c <= '~' ? c : '?';
  return result + (text.size() > kMaxQuoted ? "...'" : "'");
}

/// Reads lines and knows where it is.
class LineReader {
 public:
  explicit LineReader(const std::string& path) : path_(path), file_(path, std::ios::binary) {
    FOVEA_CHECK(file_.good(), invalid_argument, "workload file {} cannot be opened", path);
  }

  /// The next line that is not blank, without its line end. False at the end of the file.
  bool next(std::string& line) {
    while (read(line)) {
      if (number_ == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);
      while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
      if (!line.empty()) return true;
    }
    return false;
  }

  [[noreturn]] void reject(std::string_view field, const std::string& problem) const {
    fail(ErrorCode::corrupt_file, "{}:{}: {} {}", path_, number_, field, problem);
  }

 private:
  bool read(std::string& line) {
    line.clear();
    ++number_;
    for (int c = file_.get(); c != std::char_traits<char>::eof(); c = file_.get()) {
      if (c == '\n') return true;
      if (line.size() == kMaxLine) {
        reject("line", "is longer than " + std::to_string(kMaxLine) + " bytes");
      }
      line.push_back(static_cast<char>(c));
    }
    FOVEA_CHECK(!file_.bad(), corrupt_file, "{}:{}: cannot be read", path_, number_);
    return !line.empty();
  }

  std::string path_;
  std::ifstream file_;
  std::int64_t number_ = 0;
};

// ---------------------------------------------------------------- CSV

constexpr std::string_view kTimestamp = "TIMESTAMP";
constexpr std::string_view kContextTokens = "ContextTokens";
constexpr std::string_view kGeneratedTokens = "GeneratedTokens";

std::vector<std::string_view> split_fields(std::string_view line) {
  std::vector<std::string_view> fields;
  while (true) {
    const std::size_t comma = line.find(',');
    fields.push_back(line.substr(0, comma));
    if (comma == std::string_view::npos) return fields;
    line.remove_prefix(comma + 1);
  }
}

std::int32_t parse_count(const LineReader& reader, std::string_view field, std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 0 || value > kMaxTokens) {
    reader.reject(field, "is " + excerpt(text) + ", must be a whole number from 0 to 2147483647");
  }
  return static_cast<std::int32_t>(value);
}

/// Takes `digits` digits and the separator before them from the front of `text`; -1 if not there.
int take_number(std::string_view& text, std::string_view separators, std::size_t digits) {
  if (!separators.empty()) {
    if (text.empty() || separators.find(text.front()) == std::string_view::npos) return -1;
    text.remove_prefix(1);
  }
  if (text.size() < digits) return -1;
  int value = 0;
  for (char c : text.substr(0, digits)) {
    if (c < '0' || c > '9') return -1;
    value = 10 * value + (c - '0');
  }
  text.remove_prefix(digits);
  return value;
}

/// Fraction of a second at the front of `text`, as in ".97996"; -1 for a point without digits.
double take_fraction(std::string_view& text) {
  if (text.empty() || text.front() != '.') return 0;
  text.remove_prefix(1);
  double value = 0, unit = 1;
  std::size_t digits = 0;
  for (; digits < text.size() && text[digits] >= '0' && text[digits] <= '9'; ++digits) {
    unit /= 10;
    value += unit * (text[digits] - '0');
  }
  text.remove_prefix(digits);
  return digits == 0 ? -1 : value;
}

/// Seconds since 1970 of "YYYY-MM-DD hh:mm:ss[.f][Z|+hh:mm|-hh:mm]"; NaN for anything else.
double parse_timestamp(std::string_view text) {
  const int year = take_number(text, "", 4);
  const int month = take_number(text, "-", 2);
  const int day = take_number(text, "-", 2);
  const int hour = take_number(text, " T", 2);
  const int minute = take_number(text, ":", 2);
  const int second = take_number(text, ":", 2);
  const double fraction = take_fraction(text);
  if (std::min({year, month, day, hour, minute, second}) < 0 || fraction < 0 || hour > 23 ||
      minute > 59 || second > 60) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const std::chrono::year_month_day date{std::chrono::year{year},
                                         std::chrono::month{static_cast<unsigned>(month)},
                                         std::chrono::day{static_cast<unsigned>(day)}};
  int offset_minutes = 0;
  if (text == "Z") {
    text = {};
  } else if (!text.empty()) {
    const int sign = text.front() == '-' ? -1 : 1;
    const int hours = take_number(text, "+-", 2);
    const int minutes = take_number(text, ":", 2);
    if (hours < 0 || minutes < 0) return std::numeric_limits<double>::quiet_NaN();
    offset_minutes = sign * (60 * hours + minutes);
  }
  if (!date.ok() || !text.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto days = std::chrono::sys_days{date}.time_since_epoch().count();
  return 86400.0 * days + 3600 * hour + 60 * (minute - offset_minutes) + second + fraction;
}

struct CsvColumns {
  std::size_t count = 0;
  std::size_t timestamp = 0;
  std::size_t context_tokens = 0;
  std::size_t generated_tokens = 0;
};

CsvColumns parse_header(const LineReader& reader, std::string_view line) {
  const std::vector<std::string_view> names = split_fields(line);
  const auto column = [&](std::string_view name) {
    const auto at = std::find(names.begin(), names.end(), name);
    if (at == names.end()) reader.reject(name, "is missing in the header " + excerpt(line));
    return static_cast<std::size_t>(at - names.begin());
  };
  return {names.size(), column(kTimestamp), column(kContextTokens), column(kGeneratedTokens)};
}

RequestSpec parse_row(const LineReader& reader, const CsvColumns& columns, std::string_view line) {
  const std::vector<std::string_view> fields = split_fields(line);
  if (fields.size() != columns.count) {
    reader.reject("row", "has " + std::to_string(fields.size()) + " fields, must have " +
                             std::to_string(columns.count));
  }
  RequestSpec spec;
  const std::string_view timestamp = fields[columns.timestamp];
  spec.arrival_s = parse_timestamp(timestamp);
  if (std::isnan(spec.arrival_s)) {
    reader.reject(kTimestamp, "is " + excerpt(timestamp) + ", must be YYYY-MM-DD hh:mm:ss");
  }
  spec.prompt_tokens = parse_count(reader, kContextTokens, fields[columns.context_tokens]);
  spec.answer_tokens = parse_count(reader, kGeneratedTokens, fields[columns.generated_tokens]);
  return spec;
}

/// Arrivals count from the earliest one.
void rebase_arrivals(std::vector<RequestSpec>& requests) {
  double first = std::numeric_limits<double>::infinity();
  for (const RequestSpec& spec : requests) first = std::min(first, spec.arrival_s);
  for (RequestSpec& spec : requests) spec.arrival_s -= first;
}

// ---------------------------------------------------------------- JSONL

using nlohmann::json;

std::int32_t json_count(const LineReader& reader, const json& value, std::string_view field,
                        std::int64_t least) {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() ||
                     value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMaxTokens)) &&
                    value.get<std::int64_t>() >= least && value.get<std::int64_t>() <= kMaxTokens;
  if (!fits) {
    reader.reject(field,
                  "is " + excerpt(value.dump(-1, ' ', true, json::error_handler_t::replace)) +
                      ", must be a whole number from " + std::to_string(least) + " to 2147483647");
  }
  return static_cast<std::int32_t>(value.get<std::int64_t>());
}

double json_seconds(const LineReader& reader, const json& value, std::string_view field) {
  if (!value.is_number() || !(value.get<double>() >= 0)) {
    reader.reject(field, "is " +
                             excerpt(value.dump(-1, ' ', true, json::error_handler_t::replace)) +
                             ", must be a number of seconds, at least 0");
  }
  return value.get<double>();
}

RequestSpec parse_object(const LineReader& reader, const std::string& line) {
  const json object = json::parse(line, nullptr, false);
  if (!object.is_object()) reader.reject("line", "is not a JSON object: " + excerpt(line));
  RequestSpec spec;
  for (const auto& [field, value] : object.items()) {
    if (field == "prompt_tokens") {
      spec.prompt_tokens = json_count(reader, value, field, 0);
    } else if (field == "answer_tokens") {
      spec.answer_tokens = json_count(reader, value, field, 0);
    } else if (field == "arrival_s") {
      spec.arrival_s = json_seconds(reader, value, field);
    } else if (field == "prefix_group") {
      spec.prefix_group = json_count(reader, value, field, -1);
    } else if (field == "prefix_tokens") {
      spec.prefix_tokens = json_count(reader, value, field, 0);
    } else {
      reader.reject(excerpt(field),
                    "is unknown, must be prompt_tokens, answer_tokens, arrival_s, prefix_group or "
                    "prefix_tokens");
    }
  }
  for (const char* field : {"prompt_tokens", "answer_tokens"}) {
    if (!object.contains(field)) reader.reject(field, "is missing");
  }
  if (spec.prefix_tokens > spec.prompt_tokens) {
    reader.reject("prefix_tokens", "is " + std::to_string(spec.prefix_tokens) +
                                       ", must be at most prompt_tokens, " +
                                       std::to_string(spec.prompt_tokens));
  }
  if (spec.prefix_tokens > 0 && spec.prefix_group < 0) {
    reader.reject("prefix_group", "is missing, but prefix_tokens is given");
  }
  return spec;
}

}  // namespace

Workload load_workload(const std::string& path, std::int64_t limit, std::uint64_t seed) {
  LineReader reader(path);
  Workload workload{path, seed, {}};
  std::string line;
  FOVEA_CHECK(reader.next(line), corrupt_file, "{}:1: file holds no request", path);
  const bool is_json = line.front() == '{' || line.front() == '[';
  CsvColumns columns;
  bool more = true;
  if (!is_json) {
    columns = parse_header(reader, line);
    more = reader.next(line);
    FOVEA_CHECK(more, corrupt_file, "{}:2: file holds no request after its header", path);
  }
  while (more && (limit < 0 || static_cast<std::int64_t>(workload.requests.size()) < limit)) {
    workload.requests.push_back(is_json ? parse_object(reader, line)
                                        : parse_row(reader, columns, line));
    more = reader.next(line);
  }
  if (!is_json) rebase_arrivals(workload.requests);
  return workload;
}

}  // namespace fovea
