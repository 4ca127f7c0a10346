// check, bench, plan and info.
#include <fstream>

#include "tools/tool.h"

namespace fovea::test {
namespace {

TEST(Plan, MatchesTheGolden) {
  const ToolResult result = run_tool(
      {"plan", "--query-lens", "300,1,7,1", "--context-lens", "5000,9,0,30", "--workspace-rows",
       "2048", "--block-size", "16", "--workers", "2", "--kv-tile", "64", "--query-tile", "64"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, read_file(FOVEA_TEST_DATA "/plan.golden.txt"));
}

TEST(Plan, ShowsWhatAWindowLeavesOfTheContext) {
  const auto plan_of = [](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"plan",           "--query-lens", "300,1",
                                          "--context-lens", "5000,4000",    "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return json::parse(result.out).at("plan");
  };
  const json windowed = plan_of({"--window-left", "99"});
  EXPECT_EQ(windowed.at("variant").at("window_left"), 99);
  // The first query of the prefill stands at 5000 and sees 4901 on: 104 rows from a block border.
  EXPECT_EQ(windowed.at("peak_context_rows"), 104);
  EXPECT_EQ(plan_of({"--attention-chunk", "64"}).at("variant").at("attention_chunk"), 64);
  const json paged = plan_of({"--context-plan", "paged"});
  EXPECT_EQ(paged.at("peak_context_rows"), 0);
  EXPECT_TRUE(paged.at("chunks").empty());
}

TEST(Plan, ReadsABatchFromAFileAndPrintsJson) {
  const TempDir directory;
  const std::string batch =
      directory.write("batch.json", R"({"query_lens": [4, 1], "context_lens": [0, 8]})");
  const ToolResult result = run_tool({"plan", "--batch", batch, "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json plan = json::parse(result.out);
  EXPECT_EQ(plan.at("order"), (std::vector<int>{1, 0})) << "the decode comes first";
  EXPECT_TRUE(plan.at("plan").is_object());
}

TEST(Plan, RefusesABatchFileByFileAndField) {
  struct Broken {
    const char* text;
    std::vector<std::string> mentioned;
  };
  const TempDir directory;
  for (const Broken& broken : std::vector<Broken>{
           {R"({"query_lens": [4, 1]})", {"context_lens is missing"}},
           {R"({"query_lens": [4, 1.5], "context_lens": [0, 0]})", {"query_lens[1] was 1.5"}},
           {R"({"query_lens": [4], "context_lens": [-1]})", {"context_lens[0] was -1", "from 0"}},
           {R"({"query_lens": 4, "context_lens": [0]})", {"query_lens was 4", "an array"}},
           {R"({"query_lens": [4], "context_lens": [0], "lens": 1})", {"has 'lens'"}},
           {R"({"query_lens": [4], "context_lens": []})", {"context_lens: has 0 lengths"}},
           {R"({"query_lens": [], "context_lens": []})", {"query_lens: was empty"}},
           {"[1]", {"was array", "an object"}},
           {"{", {"is not JSON"}}}) {
    const std::string path = directory.write("broken.json", broken.text);
    const ToolResult refused = run_tool({"plan", "--batch", path});
    EXPECT_EQ(refused.exit_code, 1) << broken.text;
    EXPECT_TRUE(mentions(refused.err, {"broken.json"})) << broken.text;
    for (const std::string& part : broken.mentioned) {
      EXPECT_NE(refused.err.find(part), std::string::npos) << part << " is not in " << refused.err;
    }
    EXPECT_EQ(refused.err.find("--query-lens"), std::string::npos) << refused.err;
    EXPECT_EQ(refused.err.find("json.exception"), std::string::npos) << refused.err;
  }
}

TEST(Info, ListsBytesOfATokenInEveryFormat) {
  const TempDir directory;
  const std::string path = directory.path() + "/formats.json";
  const ToolResult result = run_tool({"info", "--formats", "--json", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json formats = json::parse(read_file(path));
  EXPECT_EQ(formats.at("deepseek-v3").at("fp8_ds_mla"), 656);
  EXPECT_EQ(formats.at("minicpm3-4b").at("int4_per_token"), 144 + 8);
  EXPECT_TRUE(formats.at("minicpm3-4b").at("fp8_ds_mla").is_null());
  EXPECT_EQ(formats.at("llama-3-8b").at("int8_per_token"), 2 * 8 * (128 + 8));
  EXPECT_NE(result.out.find("int8_per_token"), std::string::npos);
}

TEST(Info, ListsTheMachineEveryOpAndEveryPreset) {
  const TempDir directory;
  const std::string path = directory.path() + "/info.json";
  const ToolResult result =
      run_tool({"info", "--backend", "reference", "--threads", "3", "--json", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json info = json::parse(read_file(path));
  EXPECT_EQ(info.at("version"), FOVEA_VERSION);
  EXPECT_EQ(info.at("machine").at("threads"), 3);
  EXPECT_EQ(info.at("machine").at("backend"), "reference");
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    for (const char* op : {"rms_norm", "rope", "kv_append", "kv_gather", "attention_prefill",
                           "mla_decode", "merge_state", "gqa_append", "attention_decode"}) {
      EXPECT_TRUE(info.at("ops").at(dtype).at(op).contains("takes")) << op << " " << dtype;
      EXPECT_NE(result.out.find(op), std::string::npos) << op;
    }
    EXPECT_TRUE(info.at("linear").contains(dtype));
  }
  const auto preset = [&](const char* name) {
    for (const json& candidate : info.at("presets")) {
      if (candidate.at("name") == name) return candidate;
    }
    ADD_FAILURE() << name << " is missing";
    return json();
  };
  EXPECT_EQ(preset("deepseek-v2-lite").at("latent_bytes_per_token"), (512 + 64) * 2);
  EXPECT_EQ(preset("deepseek-v2-lite").at("expanded_bytes_per_token"), 16 * (192 + 128) * 2);
  EXPECT_EQ(preset("gpt-oss-20b").at("bytes_per_token"), 8 * 128 * 2);
  EXPECT_EQ(preset("gpt-oss-20b").at("sliding_window"), 128);
  EXPECT_EQ(preset("gpt-oss-20b").at("windowed_layers"), 12);
  EXPECT_EQ(preset("gemma-3-4b").at("sliding_window"), 1024);
  EXPECT_EQ(preset("llama-3-8b").at("windowed_layers"), 0);
  EXPECT_EQ(info.at("presets").size(), 14u);
  EXPECT_NE(result.out.find("gemma-3-4b"), std::string::npos);
}

TEST(Check, PassesHereAndCountsEveryOp) {
  const ToolResult result = run_tool({"check", "--seconds", "4", "--seed", "7"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("reference/scalar"), std::string::npos);
  EXPECT_NE(result.out.find("cpu/scalar"), std::string::npos);
  EXPECT_NE(result.out.find(" 0 failed"), std::string::npos);
}

TEST(Check, RunsOneCase) {
  const ToolResult good = run_tool({"check", "--case", "mla_decode bf16 heads=3 kv=70,5 q=2"});
  EXPECT_EQ(good.exit_code, 0) << good.out;
  EXPECT_NE(good.out.find("1 cases, 0 failed"), std::string::npos) << good.out;
}

TEST(Bench, TimesCasesOfAFileAgainstMeasuredLimits) {
  const TempDir directory;
  const std::string suite = directory.write(
      "tiny.txt", "# two\nrms_norm f32 tokens=4 dim=8\n\nmla_decode f32 heads=2 kv=64 name=two\n");
  const std::string path = directory.path() + "/bench.json";
  const ToolResult result =
      run_tool({"bench", "--suite", suite, "--rounds", "1", "--seconds", "0.02", "--json", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json bench = json::parse(read_file(path));
  EXPECT_GT(bench.at("peaks").at("f32_fma_gflops"), 0);
  EXPECT_GT(bench.at("peaks").at("read_gbps"), 0);
  ASSERT_EQ(bench.at("cases").size(), 2u);
  const json& decode = bench.at("cases").at(1);
  EXPECT_EQ(bench.at("cases").at(0).at("case"), "rms_norm f32 tokens=4 dim=8");
  EXPECT_EQ(decode.at("case"), "two");
  EXPECT_EQ(decode.at("limit"), "f32 FMA");
  // GFLOP/s times microseconds are thousands of operations.
  EXPECT_NEAR(decode.at("gflops").get<double>() * decode.at("time_us").get<double>() * 1e3,
              2.0 * 2 * 64 * (576 + 512), 1);
  EXPECT_GT(decode.at("percent_of_limit"), 0);
}

TEST(Bench, FailsBelowTheRequiredPercent) {
  const ToolResult result = run_tool({"bench", "--case", "rms_norm f32 tokens=1 dim=8", "--rounds",
                                      "1", "--seconds", "0.02", "--require-percent", "100"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.out.find("below 100 % of its limit: rms_norm"), std::string::npos) << result.out;
}

}  // namespace
}  // namespace fovea::test
