// fovea: serve, time, check and explain attention from the command line.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "commands.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

struct Entry {
  const char* name;
  const char* what;
  Command (*declare)(Options&);
};
constexpr Entry kEntries[] = {
    {"run", "Serve a workload; verify and compare it", declare_run},
    {"bench", "Time cases against the machine's limits", declare_bench},
    {"check", "Try random shapes against the float64 oracle", declare_check},
    {"plan", "Show what a batch becomes", declare_plan},
    {"info", "Show the machine and what each op takes", declare_info},
};

constexpr const char* kFooter =
    "Exit codes:\n"
    "  0    all is well\n"
    "  1    a failed verification, check or gate, a bad file, or nothing was served\n"
    "  2    the options are wrong\n"
    "  130  interrupted\n"
    "Environment:\n"
    "  FOVEA_BACKEND=cpu|reference|cuda        kernels where --backend is not given\n"
    "  FOVEA_ISA=scalar|avx2|avx512|avx512_bf16|neon  their instructions (default: the fastest "
    "here)\n"
    "  FOVEA_LINEAR=onednn|plain|auto          matrix products\n"
    "  OMP_WAIT_POLICY=passive                 threads that wait sleep: for shared machines";

int complain(const char* message, int exit_code) {
  std::fflush(stdout);
  fmt::print(stderr, "fovea: error: {}\n", message);
  return exit_code;
}

int main(int argc, char** argv) {
  int exit_code = 0;
  CLI::App app("Attention engine for LLM inference", "fovea");
  app.set_version_flag("--version", "fovea " FOVEA_VERSION);
  app.require_subcommand(1);
  app.footer(kFooter);
  for (const Entry& entry : kEntries) {
    CLI::App* sub = app.add_subcommand(entry.name, entry.what);
    Options options(*sub);
    sub->callback([command = entry.declare(options), &exit_code] { exit_code = command(); });
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::RequiredError&) {
    std::vector<const char*> names;
    for (const Entry& entry : kEntries) names.push_back(entry.name);
    const std::string message = fmt::format("subcommand: was '{}', must be one of {}",
                                            argc > 1 ? argv[1] : "", fmt::join(names, ", "));
    return complain(message.c_str(), kExitUsage);
  } catch (const CLI::ParseError& error) {
    return complain(error.what(), kExitUsage);
  } catch (const Error& error) {
    const bool is_usage = error.code() == ErrorCode::invalid_argument;
    return complain(error.what(), is_usage ? kExitUsage : kExitFailure);
  } catch (const std::exception& error) {
    return complain(error.what(), kExitFailure);
  }
  return exit_code;
}

}  // namespace
}  // namespace fovea::cli

int main(int argc, char** argv) { return fovea::cli::main(argc, argv); }
