#pragma once

#include <vector>

#include "fovea/model.h"

namespace fovea {

/// Those of model_presets() with grouped-query attention.
std::vector<PresetInfo> gqa_presets();

}  // namespace fovea
