// Checks of indices that only the device can read, where RuntimeOptions::check_device_indices asks
// for them.
#pragma once

#include "fovea/ops.h"

namespace fovea::cuda {

/// lens[r] becomes the schedule's device_seq_lens[r]; 0 where that is negative or more than
/// seq_lens[r], or where a block that its keys need is none of the cache. `lens` is device memory
/// for twice as many words, the second half scratch.
void check_lengths(const OpContext& ctx, const DecodeSchedule& schedule,
                   const BlockTableView& blocks, const PagedKvCache& cache,
                   const AttentionVariant& variant, std::int32_t* lens);

}  // namespace fovea::cuda
