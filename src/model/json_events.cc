#include "model/json_events.h"

#include <nlohmann/json.hpp>

#include "core/check.h"

namespace fovea {

namespace {

using nlohmann::json;

class Adapter : public nlohmann::json_sax<json> {
 public:
  Adapter(const std::string& file_name, JsonEvents& events)
      : file_name_(file_name), events_(events) {}

  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("a boolean"); }
  bool number_integer(number_integer_t) override { return other("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return other("not a 64-bit integer");
  }
  bool binary(binary_t&) override { return other("binary"); }
  bool number_unsigned(number_unsigned_t value) override {
    events_.integer(value);
    return true;
  }
  bool string(string_t& value) override {
    events_.text(value);
    return true;
  }
  bool key(string_t& name) override {
    events_.key(name);
    return true;
  }
  bool start_object(std::size_t) override {
    events_.begin_object();
    return true;
  }
  bool end_object() override {
    events_.end_object();
    return true;
  }
  bool start_array(std::size_t) override {
    events_.begin_array();
    return true;
  }
  bool end_array() override {
    events_.end_array();
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // After the library's own words for the place: "[id] parse error at line 1, column 3: ".
    std::string_view reason = error.what();
    if (const auto at = reason.find(": "); at != reason.npos) reason.remove_prefix(at + 2);
    fail(ErrorCode::corrupt_file, "{}: JSON is malformed at byte {}: {}", file_name_, position,
         printable(reason));
  }

 private:
  bool other(std::string_view what) {
    events_.other(what);
    return true;
  }

  const std::string& file_name_;
  JsonEvents& events_;
};

}  // namespace

void parse_json(std::string_view text, const std::string& file_name, JsonEvents& events) {
  Adapter adapter(file_name, events);
  json::sax_parse(text.begin(), text.end(), &adapter);
}

std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 100;  // Enough for every tensor name of the models at hand.
  std::string result = "'";
  for (const char c : text.substr(0, kLongest)) result += c >= ' ' && c <= '~' ? c : '?';
  return result + (text.size() > kLongest ? "...'" : "'");
}

}  // namespace fovea
