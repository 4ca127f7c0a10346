// What the steps of a run may be at most, found before the first.
#pragma once

#include "engine/step_runner.h"

namespace fovea::engine {

/// Throws Error(invalid_argument) that names the option: out of range, or nothing that the model's
/// kind of attention can honour.
void check_options(const Model& model, const EngineOptions& options);

/// What the workload's requests, as far as the model can serve them, need of everything.
StepLimits find_limits(const Workload& workload, const EngineOptions& options, const Model& model,
                       const std::vector<KvGroup>& groups);

}  // namespace fovea::engine
