// One JSON object of config.json, read field by field with messages that name file and field.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

/// Products of any two dimensions, and of both with an element's bytes, stay far within 64 bits.
inline constexpr std::int64_t kMaxDim = 1 << 24;

/// A view: the JSON outlives it. A field that is null counts as absent. What is missing or has
/// another type or value than it must throws Error(corrupt_file).
class ConfigFields {
 public:
  ConfigFields(const nlohmann::json& object, std::string file, std::string path = "")
      : object_(object), file_(std::move(file)), path_(std::move(path)) {}

  const std::string& file() const { return file_; }
  std::string name_of(std::string_view key) const { return path_ + std::string(key); }

  bool has(const char* key) const;
  bool is_null(const char* key) const;  ///< There, and null.

  std::int64_t integer(const char* key, std::int64_t least, std::int64_t most) const;
  std::int64_t dim(const char* key) const { return integer(key, 1, kMaxDim); }
  std::int64_t dim_or(const char* key, std::int64_t absent) const {
    return has(key) ? dim(key) : absent;
  }
  double number(const char* key, double least) const;
  double number_or(const char* key, double absent, double least) const {
    return has(key) ? number(key, least) : absent;
  }
  bool boolean_or(const char* key, bool absent) const;
  std::string text(const char* key) const;
  std::vector<double> numbers(const char* key, std::size_t count, double least) const;
  std::vector<std::string> texts(const char* key) const;
  ConfigFields child(const char* key) const;
  /// Of the fields that are not null.
  std::vector<std::string> keys() const;

  /// Throws Error(unsupported) unless each of these is absent or false.
  void refuse(std::initializer_list<const char*> keys) const;
  /// Throws Error(unsupported) on any other field: what is not known could change the result.
  void refuse_others(std::initializer_list<std::string_view> known) const;

 private:
  const nlohmann::json& require(const char* key) const;
  double to_number(const nlohmann::json& value, const char* key, double least) const;

  const nlohmann::json& object_;
  std::string file_;
  std::string path_;
};

/// Throws Error(corrupt_file) unless the text is one JSON object of reasonable size and depth.
nlohmann::json parse_config_object(const std::string& text, const std::string& file_name);

}  // namespace fovea
