// How numbers, tables, progress and verdicts read.
#include <gtest/gtest.h>

#include "progress.h"
#include "run_report.h"
#include "table.h"

namespace fovea::cli {
namespace {

TEST(Text, NumbersHaveThreeDigits) {
  EXPECT_EQ(format_number(0), "0");
  EXPECT_EQ(format_number(0.012345), "0.0123");
  EXPECT_EQ(format_number(4.5678), "4.57");
  EXPECT_EQ(format_number(789.4), "789");
  EXPECT_EQ(format_number(12345), "12345");
  EXPECT_EQ(format_number(1.234e-5), "1.23e-05");
  EXPECT_EQ(format_number(-2.5), "-2.50");
  EXPECT_EQ(format_number(std::numeric_limits<double>::infinity()), "inf");
}

TEST(Text, BytesAndDurationsHaveUnits) {
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(3.0 * 1024 * 1024 * 1024), "3.00 GiB");
  EXPECT_EQ(format_duration(42.6), "43 s");
  EXPECT_EQ(format_duration(125), "2 min 05 s");
  EXPECT_EQ(format_duration(4800), "1 h 20 min");
}

TEST(Text, ColumnsAreAligned) {
  Table table({"case", "ms"});
  table.add({"a", "1.00"});
  table.add({"longer", "12.0"});
  EXPECT_EQ(table.to_text(),
            "  case      ms\n"
            "  a       1.00\n"
            "  longer  12.0\n");
}

TEST(Progress, TellsRateAndRemainingTime) {
  const ServeProgress progress{
      .requests_done = 3, .requests = 8, .tokens_done = 500, .tokens = 2000};
  EXPECT_EQ(Progress::describe(progress, 250),
            "3/8 requests, 500/2000 tokens, 250 tokens/s, 6 s left");
  EXPECT_EQ(Progress::describe(progress, 0), "3/8 requests, 500/2000 tokens");
  EXPECT_EQ(Progress::bar(0.5, 8), "[####----]");
  EXPECT_EQ(Progress::bar(2.0, 4), "[####]");
}

TEST(VerifyReport, FailsAboveTheLimitAndWithoutRows) {
  VerifyReport report{.rows = 10, .worst_relative_error = 1e-5, .limit = 1e-4, .worst_row = "x"};
  EXPECT_TRUE(report.passed());
  EXPECT_TRUE(verify_text(report).starts_with("verified: 10 rows"));
  report.worst_relative_error = 2e-4;
  EXPECT_FALSE(report.passed());
  EXPECT_TRUE(verify_text(report).starts_with("VERIFICATION FAILED"));
  report.worst_relative_error = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(report.passed());
  report = {.rows = 0, .worst_relative_error = 0, .limit = 1e-4, .worst_row = ""};
  EXPECT_FALSE(report.passed());
  EXPECT_TRUE(verify_text(report).starts_with("NOT VERIFIED"));
}

TEST(CompareReport, ClosesWithTheMeasuredRatiosOfTheLongestContext) {
  const std::vector<CompareResult> results = {{"expanded_cache", 8192, 9000, 2.0, 1e-3},
                                              {"expand_every_step", 8192, 1000, 10.0, 1e-3},
                                              {"fovea", 8192, 1000, 1.0, 1e-3},
                                              {"expanded_cache", 32768, 36000, 4.0, 1e-3},
                                              {"expand_every_step", 32768, 4000, 90.0, 1e-3},
                                              {"fovea", 32768, 4000, 5.0, 1e-3}};
  const std::string text = compare_text(results);
  for (const char* part : {"At 32768 tokens", "9.0 times smaller", "18.0 times faster than",
                           "0.80 times as fast as"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
  }
  const nlohmann::ordered_json json = compare_json(results);
  ASSERT_EQ(json.size(), 6u);
  EXPECT_EQ(json[4].at("method"), "expand_every_step");
  EXPECT_EQ(json[4].at("context"), 32768);
  EXPECT_EQ(json[4].at("cache_bytes"), 4000);
  EXPECT_EQ(json[4].at("step_ms"), 90.0);
  EXPECT_EQ(json[4].at("worst_error"), 1e-3);
}

}  // namespace
}  // namespace fovea::cli
