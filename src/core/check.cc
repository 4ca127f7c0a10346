#include "core/check.h"

#include <fmt/args.h>

#include <cmath>
#include <limits>

namespace fovea {

void fail_formatted(ErrorCode code, std::string_view format, std::span<const MessageArg> args) {
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  for (const MessageArg& arg : args) {
    switch (arg.kind) {
      case MessageArg::Kind::boolean:
        store.push_back(arg.signed_integer != 0);
        break;
      case MessageArg::Kind::signed_integer:
        store.push_back(arg.signed_integer);
        break;
      case MessageArg::Kind::unsigned_integer:
        store.push_back(arg.unsigned_integer);
        break;
      case MessageArg::Kind::real:
        // What was a float prints with a float's digits: 0.02, not 0.019999999552965164.
        if (std::abs(arg.real) <= std::numeric_limits<float>::max() &&
            static_cast<double>(static_cast<float>(arg.real)) == arg.real) {
          store.push_back(static_cast<float>(arg.real));
        } else {
          store.push_back(arg.real);
        }
        break;
      case MessageArg::Kind::text:
        store.push_back(arg.text);
        break;
    }
  }
  throw Error(code, fmt::vformat(format, store));
}

}  // namespace fovea
