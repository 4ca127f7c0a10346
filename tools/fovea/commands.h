// The subcommands.
#pragma once

#include <functional>

#include "fovea/plan.h"
#include "options.h"

namespace fovea::cli {

inline constexpr int kExitFailure = 1;        ///< It ran, and what it found is wrong.
inline constexpr int kExitUsage = 2;          ///< The options are wrong; nothing ran.
inline constexpr int kExitInterrupted = 130;  ///< What shells say after Ctrl-C: 128 + SIGINT.

/// Runs once the options are parsed; returns the exit code.
using Command = std::function<int()>;

// Each declares its options.
Command declare_run(Options& options);
Command declare_bench(Options& options);
Command declare_check(Options& options);
Command declare_plan(Options& options);
Command declare_info(Options& options);

/// "packed", "equal" or "paged".
ContextPlanKind parse_context_plan(const std::string& name);

}  // namespace fovea::cli
