#include "core/check.h"

#include <fmt/args.h>

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
        store.push_back(arg.real);
        break;
      case MessageArg::Kind::text:
        store.push_back(arg.text);
        break;
    }
  }
  throw Error(code, fmt::vformat(format, store));
}

}  // namespace fovea
