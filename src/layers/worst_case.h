// Schedules that take as much scratch as any within limits. They are for sizing, not for running.
#pragma once

#include "fovea/mla.h"

namespace fovea {

/// A decode cut into as many partials as `target` can cut one.
DecodeSchedule worst_decode_schedule(const AttentionLimits& limits, const PlanTarget& target);

/// Full query tiles for every thread, and as many tiles and requests as a step may have, over
/// requests of `max_seq_len` keys.
PrefillSchedule worst_prefill_schedule(const AttentionLimits& limits, std::int64_t max_seq_len,
                                       int num_threads, const PlanTarget& target);

}  // namespace fovea
