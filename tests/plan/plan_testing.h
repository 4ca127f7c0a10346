// Helpers of the planning tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/plan.h"

namespace fovea::testing {

using Lens = std::vector<std::int32_t>;

inline Lens offsets_of(const Lens& lens) {
  Lens offsets{0};
  for (const std::int32_t len : lens) offsets.push_back(offsets.back() + len);
  return offsets;
}

/// Numbers that are the same with every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int32_t between(std::int32_t least, std::int32_t most) {
    return least +
           static_cast<std::int32_t>(engine_() % static_cast<std::uint64_t>(most - least + 1));
  }
  bool one_in(std::int32_t n) { return between(1, n) == 1; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<std::int32_t>(values.size()) - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

/// `call` throws Error(code), and the message has all of `parts`.
template <class F>
void expect_error(ErrorCode code, std::initializer_list<const char*> parts, F&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const char* part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "no '" << part << "' in: " << error.what();
    }
    return;
  }
  ADD_FAILURE() << "no error";
}

}  // namespace fovea::testing
