// The case files of bench/cases, built in: the program runs wherever it is copied to.
#pragma once

#include <span>
#include <string_view>

namespace fovea::cases {

struct Suite {
  std::string_view name;  ///< Of the file, without .txt.
  std::string_view text;
};
extern const std::span<const Suite> kSuites;

}  // namespace fovea::cases
