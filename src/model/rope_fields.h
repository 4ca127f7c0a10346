// Rotation, as config.json describes it.
#pragma once

#include "fovea/rotary.h"
#include "model/config_fields.h"

namespace fovea {

/// Throws Error(unsupported) unless partial_rotary_factor is 1 or absent.
void refuse_partial_rotation(const ConfigFields& fields);

/// `base` has dim, max_position, pairing and the theta of a file that names none. Scaling and theta
/// come from rope_parameters (transformers 5), or rope_scaling and rope_theta side by side.
RopeConfig parse_rope(const ConfigFields& config, const RopeConfig& base);

/// The same from `fields` itself: rope_parameters, rope_scaling, or one layer type's part of them.
RopeConfig parse_rope_object(const ConfigFields& config, const ConfigFields& fields,
                             const RopeConfig& base);

}  // namespace fovea
