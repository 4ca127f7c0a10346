// fovea run, from a checkpoint and a workload file to its report.
#include <filesystem>

#include "model/fp8_checkpoint.h"
#include "support/tiny_model.h"
#include "tools/tool.h"

namespace fovea::test {
namespace {

class Run : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(model());
    write_tiny_model(model(), {});
    workload_ = directory_.write("workload.jsonl",
                                 "{\"prompt_tokens\": 40, \"answer_tokens\": 6}\n"
                                 "{\"prompt_tokens\": 1, \"answer_tokens\": 3}\n"
                                 "{\"prompt_tokens\": 90, \"answer_tokens\": 4}\n");
  }
  std::string model() const { return directory_.path() + "/model"; }
  std::string report_path() const { return directory_.path() + "/report.json"; }
  std::vector<std::string> arguments(const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"run",     "--model", model(),      "--workload",
                                    workload_, "--json",  report_path()};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  json report() const { return json::parse(read_file(report_path())); }

  TempDir directory_;
  std::string workload_;
};

TEST_F(Run, ServesVerifiesAndReports) {
  const ToolResult result = run_tool(arguments({"--verify", "--dtype", "f32"}));
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  for (const char* text :
       {"attention without MLP", "deepseek_v3", "time to first token", "prefill", "GFLOP/s",
        "prefix hits", "preemptions", "3 finished, 0 refused", "verified: "}) {
    EXPECT_NE(result.out.find(text), std::string::npos) << text << " is not in\n" << result.out;
  }
  const json report = this->report();
  EXPECT_EQ(report.at("requests").at("finished"), 3);
  EXPECT_EQ(report.at("requests").at("refused"), 0);
  EXPECT_EQ(report.at("tokens").at("answer"), 13);
  EXPECT_GT(report.at("verify").at("rows"), 0);
  EXPECT_LE(report.at("verify").at("worst_relative_error"), 1e-4);
  EXPECT_EQ(report.at("verify").at("limit"), 1e-4);
  EXPECT_GT(report.at("decode").at("step_ms").at("p50"), 0);
  EXPECT_EQ(report.at("options").at("layers"), 2);
  EXPECT_EQ(report.at("options").at("requests"), 3);
  EXPECT_EQ(report.at("interrupted"), false);
  for (const char* key : {"version", "machine", "prefill", "gflops_per_s", "kv_groups", "drafts",
                          "prefix_hit_tokens", "preemptions", "cache_bytes", "workspace"}) {
    EXPECT_TRUE(report.contains(key)) << key;
  }
}

TEST_F(Run, VerifiesCheckpointsInFp8) {
  const auto verified = [&](const Fp8Form& form, const Fp8Checkpoint& checkpoint,
                            const json& config) {
    const TempDir model;
    checkpoint.write(model, config);
    const ToolResult result = run_tool({"run", "--model", model.path(), "--workload", workload_,
                                        "--json", report_path(), "--verify", "--dtype",
                                        "f32"});
    ASSERT_EQ(result.exit_code, 0) << form.name << "\n" << result.out << result.err;
    EXPECT_GT(report().at("verify").at("rows"), 0);
    EXPECT_EQ(report().at("requests").at("finished"), 3);
  };
  for (const Fp8Form& form : fp8_forms()) {
    verified(form, fp8_mla_checkpoint(form), fp8_mla_config());
    verified(form, fp8_gqa_checkpoint(form), fp8_gqa_config());
  }
}

TEST_F(Run, HonoursItsOptions) {
  const ToolResult result = run_tool(
      arguments({"--layers",       "1",         "--requests",       "2",  "--seed",         "5",
                 "--dtype",        "bf16",      "--block-size",     "3",  "--num-blocks",   "40",
                 "--max-num-seqs", "1",         "--workspace-rows", "12", "--context-plan", "equal",
                 "--prefix-reuse", "off",       "--token-budget",   "16", "--threads",      "1",
                 "--backend",      "reference", "--arrivals",       "x10", "--batch-invariant"}));
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  const json report = this->report();
  const json expected = json::parse(
      R"({"layers": 1, "requests": 2, "seed": 5, "dtype": "bf16", "block-size": 3,
          "num-blocks": 40, "max-num-seqs": 1, "workspace-rows": 12, "context-plan": "equal",
          "prefix-reuse": "off", "token-budget": 16, "threads": 1, "backend": "reference",
          "arrivals": "x10", "batch-invariant": true, "verify": false, "compare": false})");
  for (const auto& [key, value] : expected.items()) {
    EXPECT_EQ(report.at("options").at(key), value) << key;
  }
  EXPECT_EQ(report.at("requests").at("finished"), 2);
  EXPECT_EQ(report.at("kv_groups").at(0).at("blocks"), 40);
  EXPECT_LE(report.at("workspace").at("peak_context_rows"), 12);
  EXPECT_GT(report.at("workspace").at("peak_context_rows"), 0);
  const json& profile = report.at("profile");
  EXPECT_GT(profile.at("kernel_ms"), 0);
  EXPECT_LE(profile.at("kernel_ms"), profile.at("step_ms"));
  EXPECT_EQ(profile.at("kernel_fraction"),
            profile.at("kernel_ms").get<double>() / profile.at("step_ms").get<double>());
  EXPECT_FALSE(report.contains("verify"));
  EXPECT_FALSE(report.contains("compare"));
  EXPECT_EQ(report.at("machine").at("backend"), "reference");
}

TEST_F(Run, ServesGroupsWithWindowsAndDrafts) {
  const std::string model = directory_.path() + "/gqa";
  std::filesystem::create_directory(model);
  write_tiny_gqa_model(model, {});
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"run",    "--model",     model,     "--workload", workload_,
                                    "--json", report_path(), "--dtype", "f32"};
    all.insert(all.end(), more.begin(), more.end());
    return run_tool(all);
  };
  const ToolResult result =
      run({"--verify", "--draft-tokens", "3", "--acceptance", "0.5", "--token-budget", "32"});
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  for (const char* text : {"4 heads over 2", "verified: ", "answer tokens per decode",
                           "2 layers, window of 20: ", "2 layers, all keys: "}) {
    EXPECT_NE(result.out.find(text), std::string::npos) << text << " is not in\n" << result.out;
  }
  const json report = this->report();
  EXPECT_EQ(report.at("options").at("draft-tokens"), 3);
  EXPECT_EQ(report.at("options").at("acceptance"), 0.5);
  EXPECT_EQ(report.at("options").at("context-plan"), "paged");
  EXPECT_EQ(report.at("tokens").at("answer"), 13);
  EXPECT_GT(report.at("drafts").at("drafted"), 0);
  const json& windowed = report.at("kv_groups").at(0);
  EXPECT_EQ(windowed.at("window_left"), 19);
  EXPECT_GT(windowed.at("freed_blocks"), 0);
  EXPECT_LT(windowed.at("peak_blocks"), windowed.at("peak_blocks_unfreed"));

  for (const auto& [option, mentioned] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--context-plan", "packed"}, "context_plan is packed, must be paged"},
           {{"--workspace-rows", "64"}, "workspace_rows is 64, must be left out"},
           {{"--compare"}, "--compare: gpt_oss has grouped-query attention"}}) {
    const ToolResult refused = run(option);
    EXPECT_EQ(refused.exit_code, 2) << option[0];
    EXPECT_EQ(refused.out, "") << option[0];
    EXPECT_NE(refused.err.find(mentioned), std::string::npos) << refused.err;
  }
}

TEST_F(Run, WritesAFilePerRequest) {
  const std::string dump = directory_.path() + "/dump";
  ASSERT_EQ(run_tool(arguments({"--dump", dump})).exit_code, 0);
  for (const char* name : {"request-000000", "request-000001", "request-000002"}) {
    EXPECT_TRUE(std::filesystem::is_regular_file(dump + "/" + name + ".safetensors")) << name;
  }
}

TEST_F(Run, SaysWhyItRefusesARequest) {
  // 90 prompt tokens in blocks of 16 do not fit into 3 of them.
  const ToolResult result = run_tool(arguments({"--num-blocks", "3"}));
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("2 finished, 1 refused"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("request 2 refused: "), std::string::npos) << result.out;
  const json report = this->report();
  EXPECT_EQ(report.at("requests").at("refused"), 1);
  EXPECT_EQ(report.at("requests").at("refusals").at(0).at("request"), 2);
  EXPECT_NE(report.at("requests").at("refusals").at(0).at("reason"), "");
}

TEST_F(Run, FailsWhereEverythingIsRefused) {
  const ToolResult result = run_tool(arguments({"--num-blocks", "1", "--block-size", "1"}));
  EXPECT_EQ(result.exit_code, 1) << result.out << result.err;
  EXPECT_NE(result.out.find("0 finished, 3 refused"), std::string::npos) << result.out;
  EXPECT_EQ(report().at("requests").at("refused"), 3);
}

TEST_F(Run, ComparesAtTheLongestContextThatAShortModelHas) {
  const ToolResult result = run_tool(arguments({"--compare"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("at 512 tokens of context alone: the model has 640 positions"),
            std::string::npos)
      << result.out;
  EXPECT_EQ(report().at("compare").at(0).at("context"), 512);
}

TEST_F(Run, RefusesToDumpOverAnEarlierRun) {
  const std::string dump = directory_.path() + "/dump";
  std::filesystem::create_directory(dump);
  directory_.write("dump/request-000007.safetensors", "");
  const ToolResult result = run_tool(arguments({"--dump", dump}));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_TRUE(mentions(result.err, {"--dump", dump.c_str(), "request-000007.safetensors"}));
}

TEST_F(Run, ALogEndsWithAllDone) {
  const ToolResult result = run_tool(arguments({}));
  EXPECT_NE(result.err.find("100 %  3/3 requests"), std::string::npos) << result.err;
}

TEST_F(Run, NamesTheModelOrFileThatIsWrong) {
  const ToolResult unknown = run_tool({"run", "--model", "no-such-model"});
  EXPECT_NE(unknown.exit_code, 0);
  EXPECT_TRUE(unknown.err.starts_with("fovea: error: ")) << unknown.err;
  EXPECT_TRUE(mentions(unknown.err, {"no-such-model"}));

  workload_ = directory_.write("broken.jsonl", "{\"prompt_tokens\": 4}\n");
  const ToolResult broken = run_tool(arguments({}));
  EXPECT_EQ(broken.exit_code, 1);
  EXPECT_TRUE(mentions(broken.err, {"fovea: error: ", "broken.jsonl", "answer_tokens"}));
}

TEST_F(Run, AnInterruptEndsItWithTheSummarySoFar) {
  // Far more than is served before the signal; one request at a time, so that some finish.
  std::string lines;
  for (int i = 0; i < 20000; ++i) lines += "{\"prompt_tokens\": 100, \"answer_tokens\": 100}\n";
  workload_ = directory_.write("long.jsonl", lines);
  Tool tool(arguments({"--max-num-seqs", "1", "--verify", "--dtype", "f32"}));
  for (int i = 0; i < 500 && tool.out_so_far().find("workload") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  tool.signal(SIGINT);
  const ToolResult result = tool.wait();
  EXPECT_EQ(result.exit_code, 130) << result.err;
  EXPECT_NE(result.out.find("time to first token"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("interrupted"), std::string::npos) << result.out;
  const json report = this->report();
  EXPECT_EQ(report.at("interrupted"), true);
  EXPECT_GT(report.at("requests").at("unfinished"), 0);
}

}  // namespace
}  // namespace fovea::test
