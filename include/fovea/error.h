// The one exception of the library.
#pragma once

#include <stdexcept>
#include <string>

namespace fovea {

enum class ErrorCode {
  invalid_argument,    ///< A value that the caller passed is wrong; the message names it.
  unsupported,         ///< The request is well formed, but nothing here implements it; why is said.
  corrupt_file,        ///< A file contradicts itself or its format.
  resource_exhausted,  ///< A capacity that the caller fixed (blocks, workspace) does not suffice.
  device_failed,       ///< A device refused or failed what it was told; the message has its words.
};

/// Thrown at the public boundary, before anything is written. The message names the argument, what
/// it was and what it must be.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace fovea
