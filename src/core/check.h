// Argument checks. Every error text names the argument, what it was and what it must be.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "fovea/error.h"

namespace fovea {

/// One value of a message. fmt itself stays in check.cc: its headers take seconds to compile, and
/// nearly every file checks something.
class MessageArg {
 public:
  enum class Kind : std::uint8_t { boolean, signed_integer, unsigned_integer, real, text };

  MessageArg(bool x) : kind(Kind::boolean), signed_integer(x) {}
  template <std::signed_integral T>
  MessageArg(T x) : kind(Kind::signed_integer), signed_integer(x) {}
  template <std::unsigned_integral T>
  MessageArg(T x) : kind(Kind::unsigned_integer), unsigned_integer(x) {}
  template <std::floating_point T>
  MessageArg(T x) : kind(Kind::real), real(x) {}
  template <class T>
  requires std::convertible_to<const T&, std::string_view> MessageArg(const T& x)
      : kind(Kind::text), text(x) {}

  Kind kind;
  union {
    std::int64_t signed_integer;
    std::uint64_t unsigned_integer;
    double real;
    std::string_view text;
  };
};

/// A format string of fmt's syntax whose replacement fields are counted by the compiler.
template <class... Args>
struct MessageFormat {
  template <std::convertible_to<std::string_view> T>
  consteval MessageFormat(const T& string) : text(string) {
    std::size_t fields = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '{') continue;
      if (i + 1 < text.size() && text[i + 1] == '{') {
        ++i;
      } else {
        ++fields;
      }
    }
    if (fields != sizeof...(Args)) throw "the message has another number of fields than arguments";
  }
  std::string_view text;
};

[[noreturn]] void fail_formatted(ErrorCode code, std::string_view format,
                                 std::span<const MessageArg> args);

/// Throws Error(code) with a formatted message: integers, floats, bools and strings, fmt's syntax.
template <class... Args>
[[noreturn]] void fail(ErrorCode code, MessageFormat<std::type_identity_t<Args>...> format,
                       const Args&... args) {
  if constexpr (sizeof...(Args) == 0) {
    fail_formatted(code, format.text, {});
  } else {
    const MessageArg list[] = {MessageArg(args)...};
    fail_formatted(code, format.text, list);
  }
}

}  // namespace fovea

/// FOVEA_CHECK(dim < ndim, invalid_argument, "dim is {}, but must be below {}", dim, ndim);
/// The message's arguments are evaluated only when the condition fails.
#define FOVEA_CHECK(condition, code, ...)                   \
  do {                                                      \
    if (!(condition)) [[unlikely]] {                        \
      ::fovea::fail(::fovea::ErrorCode::code, __VA_ARGS__); \
    }                                                       \
  } while (false)
