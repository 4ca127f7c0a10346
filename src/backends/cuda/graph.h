// CUDA graphs of a context's work.
#pragma once

#include "ops/backend.h"

namespace fovea::cuda {

KeptWork capture(const OpContext& ctx, const std::function<void()>& queue);
void launch_kept(const OpContext& ctx, const KeptWork& work);

}  // namespace fovea::cuda
