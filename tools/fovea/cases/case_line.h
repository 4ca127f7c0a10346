// "mla_decode bf16 heads=16 kv=4096 q=1": one line of text names a problem, for whoever times it
// and for whoever checks it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/dtype.h"

namespace fovea::cases {

/// What an integer of a case may be.
struct Range {
  std::int64_t min = 1;
  std::int64_t max = std::int64_t{1} << 24;
};

/// An op, a compute dtype, and values by name. A value is an integer, a list "7,300", or a word.
class CaseLine {
 public:
  CaseLine(std::string op, DType dtype) : op_(std::move(op)), dtype_(dtype) {}
  /// Throws Error(invalid_argument) that quotes the part that is wrong.
  static CaseLine parse(std::string_view text);

  const std::string& op() const { return op_; }
  DType dtype() const { return dtype_; }
  std::string to_text() const;
  /// The value of `name`, else the whole line.
  std::string name() const;

  CaseLine& set(std::string_view key, std::int64_t value);
  CaseLine& set(std::string_view key, const std::vector<std::int64_t>& values);
  CaseLine& set(std::string_view key, std::string value);

  bool has(std::string_view key) const { return find(key) != nullptr; }
  // Values; Error(invalid_argument) names the key, what it was and what it must be.
  std::int64_t integer(std::string_view key, std::int64_t fallback, Range range = {}) const;
  std::vector<std::int64_t> integers(std::string_view key,
                                     const std::vector<std::int64_t>& fallback,
                                     Range range = {}) const;
  std::string word(std::string_view key, std::string_view fallback,
                   const std::vector<std::string_view>& allowed) const;
  DType dtype_value(std::string_view key, DType fallback) const;
  /// Refuses keys that nobody asked for, but for `name`, which any line may have.
  void check_all_read() const;

 private:
  struct Value {
    std::string key;
    std::string text;
    mutable bool is_read = false;
  };
  const Value* find(std::string_view key) const;

  std::string op_;
  DType dtype_;
  std::vector<Value> values_;
};

/// The cases of a text: a line each; blank lines and what follows a '#' are skipped.
std::vector<CaseLine> parse_case_lines(std::string_view text);

}  // namespace fovea::cases
