// What an op needs besides its operands: backends to choose from, threads, scratch memory.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "fovea/plan.h"
#include "fovea/workspace.h"

namespace fovea {

struct Backend;

/// Made by Runtime. Used by one thread at a time.
struct OpContext : ExecutionContext {
  /// In order of preference. An op runs on the first that takes its operands.
  std::span<const Backend* const> backends;
  /// What plans for this context should assume.
  PlanTarget plan_target;
  /// Host memory that the device addresses: pinned on a GPU.
  MemorySource host_memory = {};
};

/// Why an implementation was taken or declined, for `fovea info`.
struct ImplementationChoice {
  std::string op;
  std::string implementation;
  std::string reason;  ///< Empty for the one that runs.
};

}  // namespace fovea
