#include "model/config_fields.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "model/json_events.h"

namespace fovea {

namespace {

using nlohmann::json;

constexpr std::size_t kMaxConfigBytes = 16 << 20;  // A thousand times the largest known.
constexpr int kMaxDepth = 32;
/// No factor of these files comes near; squares still fit a float.
constexpr double kMaxNumber = 1e12;

}  // namespace

bool ConfigFields::has(const char* key) const {
  const auto at = object_.find(key);
  return at != object_.end() && !at->is_null();
}

bool ConfigFields::is_null(const char* key) const {
  const auto at = object_.find(key);
  return at != object_.end() && at->is_null();
}

const json& ConfigFields::require(const char* key) const {
  FOVEA_CHECK(has(key), corrupt_file, "{}: field {} is missing", file_, name_of(key));
  return *object_.find(key);
}

std::int64_t ConfigFields::integer(const char* key, std::int64_t least, std::int64_t most) const {
  const json& value = require(key);
  // Unsigned values beyond int64 are integers to the parser too.
  const bool fits = value.is_number_integer() &&
                    !(value.is_number_unsigned() &&
                      value.get<std::uint64_t>() >
                          static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  const std::int64_t number = fits ? value.get<std::int64_t>() : 0;
  FOVEA_CHECK(fits && number >= least && number <= most, corrupt_file,
              "{}: field {} is {}, but must be an integer in [{}, {}]", file_, name_of(key),
              printable(value.dump()), least, most);
  return number;
}

double ConfigFields::to_number(const json& value, const char* key, double least) const {
  const double number = value.is_number() ? value.get<double>() : -1;
  FOVEA_CHECK(value.is_number() && number >= least && number <= kMaxNumber, corrupt_file,
              "{}: field {} is {}, but must be a number in [{}, {}]", file_, name_of(key),
              printable(value.dump()), least, kMaxNumber);
  return number;
}

double ConfigFields::number(const char* key, double least) const {
  return to_number(require(key), key, least);
}

bool ConfigFields::boolean_or(const char* key, bool absent) const {
  if (!has(key)) return absent;
  const json& value = require(key);
  FOVEA_CHECK(value.is_boolean(), corrupt_file, "{}: field {} is {}, but must be true or false",
              file_, name_of(key), printable(value.dump()));
  return value.get<bool>();
}

std::string ConfigFields::text(const char* key) const {
  const json& value = require(key);
  FOVEA_CHECK(value.is_string(), corrupt_file, "{}: field {} is {}, but must be text", file_,
              name_of(key), printable(value.dump()));
  return value.get<std::string>();
}

std::vector<double> ConfigFields::numbers(const char* key, std::size_t count, double least) const {
  const json& value = require(key);
  FOVEA_CHECK(value.is_array() && value.size() == count, corrupt_file,
              "{}: field {} must be a list of {} numbers", file_, name_of(key), count);
  std::vector<double> result;
  for (const json& element : value) result.push_back(to_number(element, key, least));
  return result;
}

std::vector<std::string> ConfigFields::texts(const char* key) const {
  const json& value = require(key);
  const bool fits = value.is_array() && std::all_of(value.begin(), value.end(),
                                                    [](const json& e) { return e.is_string(); });
  FOVEA_CHECK(fits, corrupt_file, "{}: field {} must be a list of texts", file_, name_of(key));
  return value.get<std::vector<std::string>>();
}

ConfigFields ConfigFields::child(const char* key) const {
  const json& value = require(key);
  FOVEA_CHECK(value.is_object(), corrupt_file, "{}: field {} is {}, but must be an object", file_,
              name_of(key), printable(value.dump()));
  return ConfigFields(value, file_, name_of(key) + ".");
}

std::vector<std::string> ConfigFields::keys() const {
  std::vector<std::string> result;
  for (const auto& [key, value] : object_.items()) {
    if (!value.is_null()) result.push_back(key);
  }
  return result;
}

void ConfigFields::refuse(std::initializer_list<const char*> keys) const {
  for (const char* key : keys) {
    FOVEA_CHECK(!has(key) || *object_.find(key) == false, unsupported,
                "{}: field {} is not supported", file_, name_of(key));
  }
}

void ConfigFields::refuse_others(std::initializer_list<std::string_view> known) const {
  for (const auto& [key, value] : object_.items()) {
    const bool is_known = std::find(known.begin(), known.end(), key) != known.end();
    FOVEA_CHECK(is_known || value.is_null(), unsupported, "{}: field {} is not supported", file_,
                printable(name_of(key)));
  }
}

json parse_config_object(const std::string& text, const std::string& file_name) {
  FOVEA_CHECK(text.size() <= kMaxConfigBytes, corrupt_file, "{}: {} bytes are more than {}",
              file_name, text.size(), kMaxConfigBytes);
  const auto limit_depth = [&](int depth, json::parse_event_t, json&) {
    FOVEA_CHECK(depth <= kMaxDepth, corrupt_file, "{}: JSON nests deeper than {} levels", file_name,
                kMaxDepth);
    return true;
  };
  json root;
  try {
    root = json::parse(text, limit_depth);
  } catch (const json::exception& error) {
    fail(ErrorCode::corrupt_file, "{}: {}", file_name, printable(error.what()));
  }
  FOVEA_CHECK(root.is_object(), corrupt_file, "{}: must be a JSON object", file_name);
  return root;
}

}  // namespace fovea
