// JSON as a stream of events: nothing is stored that the reader does not ask for, so that a hostile
// file costs no more memory than its own length.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fovea {

/// What a reader of a certain kind of file overrides. A handler rejects by throwing.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual void begin_object() = 0;
  virtual void end_object() = 0;
  virtual void begin_array() = 0;
  virtual void end_array() = 0;
  virtual void key(std::string& name) = 0;
  virtual void text(std::string& value) = 0;
  virtual void integer(std::uint64_t value) = 0;
  /// null, a boolean, a negative or fractional number, or one beyond 64 bits; `what` says which.
  virtual void other(std::string_view what) = 0;
};

/// Throws Error(corrupt_file) that names `file_name` and the byte on malformed JSON and on text
/// that is not UTF-8.
void parse_json(std::string_view json, const std::string& file_name, JsonEvents& events);

/// `text` in quotes for a message: what is not printable ASCII as '?', cut after 100 characters.
std::string printable(std::string_view text);

}  // namespace fovea
