// What the program refuses, and how it says so.
#include "tools/tool.h"

namespace fovea::test {
namespace {

struct Refusal {
  std::vector<std::string> arguments;
  std::vector<std::string> mentioned;
};

void PrintTo(const Refusal& refusal, std::ostream* stream) {
  *stream << "fovea";
  for (const std::string& argument : refusal.arguments) *stream << " '" << argument << "'";
}

class RefusedOptions : public ::testing::TestWithParam<Refusal> {};

TEST_P(RefusedOptions, SayInOneLineWhatTheyWereAndMustBe) {
  const ToolResult result = run_tool(GetParam().arguments);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_TRUE(result.err.starts_with("fovea: error: ")) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  for (const std::string& text : GetParam().mentioned) {
    EXPECT_NE(result.err.find(text), std::string::npos) << "no '" << text << "' in " << result.err;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Run, RefusedOptions,
    ::testing::Values(
        Refusal{{"run", "--layers", "0"}, {"--layers", "was '0'", "an integer from 1"}},
        Refusal{{"run", "--layers", "two"}, {"--layers", "was 'two'", "an integer from 1"}},
        Refusal{{"run", "--requests", "-3"}, {"--requests", "was '-3'", "from 1"}},
        Refusal{{"run", "--block-size", "0"}, {"--block-size", "was '0'", "from 1"}},
        Refusal{{"run", "--block-size", "16k"}, {"--block-size", "was '16k'", "an integer"}},
        Refusal{{"run", "--num-blocks", "0"}, {"--num-blocks", "was '0'", "from 1"}},
        Refusal{{"run", "--max-num-seqs", "99999999999"}, {"--max-num-seqs", "to 2147483647"}},
        Refusal{{"run", "--workspace-rows", "0"}, {"--workspace-rows", "was '0'", "from 1"}},
        Refusal{{"run", "--token-budget", "1.5"}, {"--token-budget", "was '1.5'", "an integer"}},
        Refusal{{"run", "--threads", "0"}, {"--threads", "was '0'", "from 1 to 4096"}},
        Refusal{{"run", "--seed", "-1"}, {"--seed", "was '-1'", "from 0"}},
        Refusal{{"run", "--arrivals", "x5"}, {"--arrivals", "was 'x5'", "real, x10, none"}},
        Refusal{{"run", "--dtype", "f64"}, {"--dtype", "was 'f64'", "f32, f16, bf16"}},
        Refusal{{"run", "--backend", "gpu"}, {"--backend", "was 'gpu'", "cpu, reference"}},
        Refusal{{"run", "--context-plan", "even"}, {"--context-plan", "packed, equal, paged"}},
        Refusal{{"run", "--draft-tokens", "64"}, {"--draft-tokens", "was '64'", "from 0 to 63"}},
        Refusal{{"run", "--draft-tokens", "2", "--acceptance", "1.1"},
                {"--acceptance", "was '1.1'", "a number from 0 to 1"}},
        Refusal{{"run", "--draft-tokens", "2", "--acceptance", "nan"}, {"--acceptance", "'nan'"}},
        Refusal{{"run", "--acceptance", "0.5"}, {"--acceptance", "--draft-tokens"}},
        Refusal{{"run", "--prefix-reuse", "yes"}, {"--prefix-reuse", "was 'yes'", "on, off"}},
        Refusal{{"run", "--workload", "/no/such/file"},
                {"--workload", "was '/no/such/file'", "a file that exists"}},
        Refusal{{"run", "--json", "/no/such/folder/x.json"},
                {"--json", "a file in a directory that exists"}},
        Refusal{{"run", "--json", "/proc/x.json"}, {"--json", "'/proc/x.json' cannot be written"}},
        Refusal{{"run", "--dump", ""}, {"--dump"}}, Refusal{{"run", "--model", ""}, {"--model"}},
        Refusal{{"run", "--no-such-option"}, {"--no-such-option"}}));

INSTANTIATE_TEST_SUITE_P(
    Others, RefusedOptions,
    ::testing::Values(
        Refusal{{}, {"subcommand", "run, bench"}},
        Refusal{{"serve"}, {"subcommand", "was 'serve'", "run, bench"}},
        Refusal{{"check", "--seconds", "0"}, {"--seconds", "was '0'", "from 1"}},
        Refusal{{"check", "--case", "rope f32", "--seconds", "1"}, {"--case", "--seconds"}},
        Refusal{{"check", "--case", "rope"}, {"an op and a dtype"}},
        Refusal{{"check", "--case", "rope i8"}, {"was i8", "f32, f16 or bf16"}},
        Refusal{{"check", "--case", "foo f32"}, {"op was 'foo'", "rms_norm"}},
        Refusal{{"check", "--case", "mla_decode f32 heads=0"}, {"heads was '0'", "from 1"}},
        Refusal{{"check", "--case", "rope f32 colour=1"}, {"colour", "rope"}},
        Refusal{{"check", "--case", "rope f32 dim=7"}, {"dim is 7", "even"}},
        Refusal{{"bench", "--suite", "/tmp"}, {"--suite", "was '/tmp'", "a file of cases"}},
        Refusal{{"bench", "--suite", "/dev/null"}, {"--suite", "'/dev/null' has no case"}},
        Refusal{{"bench", "--require-percent", "101"}, {"--require-percent", "from 1 to 100"}},
        Refusal{{"bench", "--rounds", "0"}, {"--rounds", "from 1 to 1000"}},
        Refusal{{"bench", "--seconds", "0.01", "--require-percent", "1", "--case",
                 "mla_decode f32 heads=1 kv=64 q=0"},
                {"--require-percent", "q=0' has no work"}},
        Refusal{{"bench", "--suite", "/no/such/suite"},
                {"--suite", "attention, cpu, cuda, grouped, kv_formats, rows"}},
        Refusal{{"bench", "--seconds", "soon"}, {"--seconds", "was 'soon'"}},
        Refusal{{"plan"}, {"--query-lens", "was empty"}},
        Refusal{{"plan", "--query-lens", "1,,2", "--context-lens", "1,1,1"},
                {"--query-lens", "was '' in '1,,2'", "an integer from 0"}},
        Refusal{{"plan", "--query-lens", "1,2", "--context-lens", "1"},
                {"--context-lens", "has 1 lengths"}},
        Refusal{{"plan", "--query-lens", "1,-2", "--context-lens", "1,1"},
                {"--query-lens", "was '-2'"}},
        Refusal{{"plan", "--query-lens", "2147483647", "--context-lens", "1"},
                {"2147483647", "at most"}},
        Refusal{{"plan", "--query-lens", "9", "--context-lens", "9", "--block-size", "64",
                 "--workspace-rows", "10"},
                {"workspace_rows", "10"}},
        Refusal{{"plan", "--query-lens", "9", "--context-lens", "9", "--context-plan", "paged",
                 "--workspace-rows", "64"},
                {"--workspace-rows", "left out", "paged"}},
        Refusal{{"plan", "--query-lens", "9", "--context-lens", "9", "--window-left", "-1"},
                {"--window-left", "was '-1'", "from 0"}},
        Refusal{{"plan", "--query-lens", "9", "--context-lens", "9", "--attention-chunk", "0"},
                {"--attention-chunk", "was '0'", "from 1"}}));

TEST(Options, AnUnknownLinearBackendIsRefusedByWhoNeverMultiplies) {
  ::setenv("FOVEA_LINEAR", "bad", 1);
  const ToolResult info = run_tool({"info"});
  const ToolResult check = run_tool({"check", "--case", "rope f32"});
  ::unsetenv("FOVEA_LINEAR");
  for (const ToolResult& result : {info, check}) {
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find("FOVEA_LINEAR is 'bad'"), std::string::npos) << result.err;
  }
}

TEST(Options, HelpAndVersionAreNoErrors) {
  const ToolResult help = run_tool({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* subcommand : {"run", "bench", "check", "plan", "info"}) {
    EXPECT_NE(help.out.find(subcommand), std::string::npos) << subcommand;
  }
  for (const char* text : {"Exit codes", "130", "FOVEA_BACKEND", "FOVEA_ISA", "FOVEA_LINEAR",
                           "OMP_WAIT_POLICY=passive"}) {
    EXPECT_NE(help.out.find(text), std::string::npos) << text;
  }
  EXPECT_EQ(run_tool({"--version"}).out, "fovea " FOVEA_VERSION "\n");
  const ToolResult run_help = run_tool({"run", "--help"});
  EXPECT_EQ(run_help.exit_code, 0);
  EXPECT_NE(run_help.out.find("--token-budget"), std::string::npos);
  EXPECT_NE(run_help.out.find("2048"), std::string::npos) << "the default is not shown";
}

}  // namespace
}  // namespace fovea::test
