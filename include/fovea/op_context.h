// What an op needs besides its operands: backends to choose from, threads, scratch memory.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "fovea/plan.h"
#include "fovea/workspace.h"

namespace fovea {

struct Backend;

/// An index in device memory that is out of range: the first that a kernel came by.
struct DeviceFault {
  enum class Argument : std::int32_t { slot_mapping, positions, seq_lens, block_table };
  std::int32_t taken = 0;  ///< 1: the rest is filled in.
  Argument argument = Argument::slot_mapping;
  std::int64_t index = 0;  ///< Of the element, row-major.
  std::int64_t value = 0;
  std::int64_t begin = 0;  ///< It must be in [begin, end).
  std::int64_t end = 0;
};

/// Made by Runtime. Used by one thread at a time.
struct OpContext : ExecutionContext {
  /// In order of preference. An op runs on the first that takes its operands.
  std::span<const Backend* const> backends;
  /// What plans for this context should assume.
  PlanTarget plan_target;
  /// Host memory that the device addresses. On a GPU managed memory, which moves to who used it
  /// last, or pinned memory where host and device may not use that at once.
  MemorySource host_memory = {};
  std::int64_t l2_bytes = 0;  ///< Of a GPU.
  /// Where kernels report; null: they do not check. See RuntimeOptions::check_device_indices.
  DeviceFault* device_fault = nullptr;
};

/// Why an implementation was taken or declined, for `fovea info`.
struct ImplementationChoice {
  std::string op;
  std::string implementation;
  std::string reason;  ///< Empty for the one that runs.
};

}  // namespace fovea
