#include "core/check.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace fovea {
namespace {

TEST(CheckTest, TheMessageHoldsEveryKindOfArgument) {
  try {
    fail(ErrorCode::unsupported, "{} {} {} {} {:.2f} {{}} {}", -3, std::size_t{7}, true, "text",
         1.5, std::string("owned"));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_STREQ(error.what(), "-3 7 true text 1.50 {} owned");
  }
}

TEST(CheckTest, AFloatPrintsWithItsOwnDigits) {
  try {
    fail(ErrorCode::unsupported, "{} {} {} {}", 0.02f, 0.1, 1e300,
         std::numeric_limits<float>::infinity());
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "0.02 0.1 1e+300 inf");
  }
}

TEST(CheckTest, ArgumentsAreEvaluatedOnlyOnFailure) {
  int evaluated = 0;
  const auto value = [&evaluated] { return ++evaluated; };
  FOVEA_CHECK(true, invalid_argument, "{}", value());
  EXPECT_EQ(evaluated, 0);
  EXPECT_THROW(FOVEA_CHECK(false, invalid_argument, "{}", value()), Error);
  EXPECT_EQ(evaluated, 1);
}

}  // namespace
}  // namespace fovea
