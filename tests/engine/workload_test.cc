#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "fovea/engine.h"
#include "fovea/error.h"

namespace fovea {
namespace {

class File {
 public:
  explicit File(const std::string& text) {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::temp_directory_path() /
            ("fovea_workload_" + std::string(test->name()) + "_" + std::to_string(++count_));
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  static inline int count_ = 0;
  std::filesystem::path path_;
};

Workload load(const std::string& text, std::int64_t limit = -1) {
  const File file(text);
  return load_workload(file.path(), limit, 1);
}

/// The error's text after the file name.
std::string rejection(const std::string& text) {
  const File file(text);
  try {
    load_workload(file.path(), -1, 1);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::corrupt_file);
    const std::string message = error.what();
    EXPECT_EQ(message.rfind(file.path() + ":", 0), 0u) << message;
    return message.substr(file.path().size() + 1);
  }
  return "accepted";
}

double quantile(std::vector<std::int32_t> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size()))];
}

TEST(GeneratedWorkload, HasTheLengthsOfAChatService) {
  const Workload workload = generate_workload(20000, 3);
  std::vector<std::int32_t> prompts, answers;
  std::int64_t sharing = 0;
  for (const RequestSpec& spec : workload.requests) {
    prompts.push_back(spec.prompt_tokens);
    answers.push_back(spec.answer_tokens);
    EXPECT_LE(spec.prefix_tokens, spec.prompt_tokens);
    EXPECT_GE(spec.answer_tokens, 1);
    sharing += spec.prefix_group >= 0;
  }
  EXPECT_NEAR(quantile(prompts, 0.5), 1020, 30);
  EXPECT_NEAR(quantile(prompts, 0.9), 2734, 120);
  EXPECT_NEAR(quantile(answers, 0.5), 129, 5);
  EXPECT_NEAR(quantile(answers, 0.9), 424, 22);
  EXPECT_NEAR(static_cast<double>(sharing) / 20000, 1.0 / 3, 0.02);
  EXPECT_NEAR(workload.requests.back().arrival_s, 20000, 600);
}

TEST(GeneratedWorkload, DependsOnTheSeedAlone) {
  const Workload a = generate_workload(50, 3), b = generate_workload(50, 3);
  const Workload c = generate_workload(50, 4);
  std::int64_t different = 0;
  for (std::size_t i = 0; i < 50; ++i) {
    EXPECT_EQ(a.requests[i].prompt_tokens, b.requests[i].prompt_tokens);
    EXPECT_EQ(a.requests[i].arrival_s, b.requests[i].arrival_s);
    different += a.requests[i].prompt_tokens != c.requests[i].prompt_tokens;
  }
  EXPECT_GT(different, 40);
  EXPECT_TRUE(generate_workload(0, 1).requests.empty());
  EXPECT_THROW(generate_workload(-1, 1), Error);
}

TEST(TokenId, IsSharedExactlyAsFarAsPrefixesReach) {
  const Workload workload{"", 5, {{0, 100, 10, 2, 40}, {0, 90, 10, 2, 60}, {0, 90, 10, 1, 60}}};
  std::int64_t equal_past_prefix = 0, equal_across_groups = 0;
  for (std::int64_t k = 0; k < 110; ++k) {
    const std::int32_t a = workload.token_id(0, k, 50000);
    EXPECT_GE(a, 0);
    EXPECT_LT(a, 50000);
    if (k >= 100) continue;
    const bool equal = a == workload.token_id(1, k, 50000);
    EXPECT_TRUE(equal || k >= 40) << k;
    equal_past_prefix += k >= 40 && equal;
    equal_across_groups += a == workload.token_id(2, k, 50000);
  }
  EXPECT_LE(equal_past_prefix, 1);
  EXPECT_LE(equal_across_groups, 1);
  EXPECT_EQ(workload.token_id(0, 5, 1), 0);
  EXPECT_THROW(workload.token_id(3, 0, 10), Error);
  EXPECT_THROW(workload.token_id(0, 0, 0), Error);
}

TEST(WorkloadFile, ReadsTheAzureTraceFormat) {
  const Workload workload = load(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-11-16 23:59:59.6800000,374,44\r\n"
      "2023-11-17 00:00:01.1800000,396,0\r\n"
      "2023-11-17 00:00:00.6800000,879,55");
  ASSERT_EQ(workload.requests.size(), 3u);
  EXPECT_EQ(workload.requests[0].prompt_tokens, 374);
  EXPECT_EQ(workload.requests[0].answer_tokens, 44);
  EXPECT_EQ(workload.requests[0].arrival_s, 0);
  EXPECT_NEAR(workload.requests[1].arrival_s, 1.5, 1e-6);
  EXPECT_EQ(workload.requests[1].answer_tokens, 0) << "kept, for the engine to refuse";
  EXPECT_NEAR(workload.requests[2].arrival_s, 1.0, 1e-6);
  EXPECT_EQ(workload.requests[2].prefix_group, -1);
}

TEST(WorkloadFile, ReadsColumnsInAnyOrderAndIsoTimestamps) {
  const Workload workload = load(
      "model,GeneratedTokens,ContextTokens,TIMESTAMP\n"
      "x,4,3,2024-02-29T12:00:00+02:00\n\n"
      "x,6,5,2024-02-29T10:00:02Z\n");
  ASSERT_EQ(workload.requests.size(), 2u);
  EXPECT_EQ(workload.requests[1].prompt_tokens, 5);
  EXPECT_EQ(workload.requests[1].answer_tokens, 6);
  EXPECT_NEAR(workload.requests[1].arrival_s, 2, 1e-6);
}

TEST(WorkloadFile, ReadsJsonLines) {
  const Workload workload = load(
      "\xef\xbb\xbf{\"prompt_tokens\": 10, \"answer_tokens\": 3}\n\n"
      "{\"answer_tokens\":1,\"prompt_tokens\":7,\"arrival_s\":2.5,\"prefix_group\":1,"
      "\"prefix_tokens\":7}\n");
  ASSERT_EQ(workload.requests.size(), 2u);
  EXPECT_EQ(workload.requests[0].prompt_tokens, 10);
  EXPECT_EQ(workload.requests[0].prefix_group, -1);
  EXPECT_EQ(workload.requests[1].arrival_s, 2.5);
  EXPECT_EQ(workload.requests[1].prefix_group, 1);
  EXPECT_EQ(workload.requests[1].prefix_tokens, 7);
}

TEST(WorkloadFile, StopsAtTheLimitBeforeItReadsMore) {
  const std::string text = "{\"prompt_tokens\":1,\"answer_tokens\":1}\nnonsense\n";
  EXPECT_EQ(load(text, 1).requests.size(), 1u);
  EXPECT_EQ(load(text, 0).requests.size(), 0u);
  EXPECT_THROW(load(text, 2), Error);
}

TEST(WorkloadFile, RejectsHostileCsvWithLineAndField) {
  const std::string header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  const std::string good = "2023-11-16 18:15:46.68,374,44\n";
  EXPECT_EQ(rejection(""), "1: file holds no request");
  EXPECT_EQ(rejection("\n\n"), "1: file holds no request");
  EXPECT_EQ(rejection(header), "2: file holds no request after its header");
  EXPECT_EQ(rejection("TIMESTAMP,ContextTokens\n1,2\n"),
            "1: GeneratedTokens is missing in the header 'TIMESTAMP,ContextTokens'");
  EXPECT_EQ(rejection(header + good + "2023-11-16 18:15:46,1\n"),
            "3: row has 2 fields, must have 3");
  EXPECT_EQ(rejection(header + "2023-11-16 18:15:46,-1,5\n"),
            "2: ContextTokens is '-1', must be a whole number from 0 to 2147483647");
  for (const char* count : {"", "3.5", "1e3", "99999999999999999999", "2147483648", " 3", "0x10"}) {
    EXPECT_EQ(rejection(header + "2023-11-16 18:15:46,5," + count + ",\n").substr(0, 6), "2: row")
        << count;
    EXPECT_EQ(rejection(header + "2023-11-16 18:15:46," + count + ",5\n").substr(0, 16),
              "2: ContextTokens")
        << count;
  }
  for (const char* time :
       {"", "yesterday", "2023-13-01 00:00:00", "2023-02-30 00:00:00", "2023-11-16 24:00:00",
        "2023-11-16 18:15:46.", "2023-11-16 18:15:46 x", "2023-11-16", "2023-11-16 18:15:46+2"}) {
    EXPECT_EQ(rejection(header + time + ",1,1\n").substr(0, 12), "2: TIMESTAMP") << time;
  }
}

TEST(WorkloadFile, RejectsHostileJsonWithLineAndField) {
  const std::string good = "{\"prompt_tokens\":1,\"answer_tokens\":1}\n";
  EXPECT_EQ(rejection(good + "{\"prompt_tokens\":1}\n"), "2: answer_tokens is missing");
  EXPECT_EQ(rejection("{\"answer_tokens\":1}\n"), "1: prompt_tokens is missing");
  EXPECT_EQ(rejection(good + "{\"prompt_tokens\":1,\n").substr(0, 31),
            "2: line is not a JSON object: '");
  EXPECT_EQ(rejection("[1,2]\n"), "1: line is not a JSON object: '[1,2]'");
  EXPECT_EQ(rejection(good + std::string(60000, '[') + "\n").substr(0, 7), "2: line");
  EXPECT_EQ(rejection(good + std::string(70000, ' ') + "\n"), "2: line is longer than 65536 bytes");
  for (const char* count : {"-1", "1.5", "\"5\"", "null", "true", "[1]", "2147483648",
                            "18446744073709551615", "99999999999999999999999"}) {
    const std::string message =
        rejection(std::string("{\"answer_tokens\":1,\"prompt_tokens\":") + count + "}\n");
    EXPECT_EQ(message.substr(0, 19), "1: prompt_tokens is") << message;
  }
  const auto with = [&](const std::string& fields) {
    return rejection("{\"prompt_tokens\":5,\"answer_tokens\":1," + fields + "}\n");
  };
  EXPECT_EQ(with("\"arrival_s\":-1"),
            "1: arrival_s is '-1', must be a number of seconds, at least 0");
  EXPECT_EQ(with("\"arrival_s\":1e999").substr(0, 7), "1: line");
  EXPECT_EQ(with("\"prefix_tokens\":6,\"prefix_group\":0"),
            "1: prefix_tokens is 6, must be at most prompt_tokens, 5");
  EXPECT_EQ(with("\"prefix_tokens\":5"), "1: prefix_group is missing, but prefix_tokens is given");
  EXPECT_EQ(with("\"prefix_group\":-2").substr(0, 15), "1: prefix_group");
  EXPECT_EQ(with("\"prefix_token\":5").substr(0, 28), "1: 'prefix_token' is unknown");
}

TEST(WorkloadFile, SaysThatItCannotBeOpened) {
  try {
    load_workload("/nonexistent/workload.csv", -1, 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_STREQ(error.what(), "workload file /nonexistent/workload.csv cannot be opened");
  }
  EXPECT_THROW(load_workload(std::filesystem::temp_directory_path().string(), -1, 1), Error);
}

}  // namespace
}  // namespace fovea
