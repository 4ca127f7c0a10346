// The KV groups of a model that have layers, and how many blocks each may hold.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/model.h"

namespace fovea::engine {

struct KvGroup {
  std::int32_t config_index = 0;  ///< Into ModelConfig::groups.
  AttentionVariant variant;
  std::vector<std::int64_t> layers;
};

/// In the order of the config; a model's first layers may leave groups without any.
std::vector<KvGroup> kv_groups(const Model& model);

/// Positions that the tables of all groups have.
std::int64_t max_position(const Model& model);

/// Keys before a query that it may still see; negative: all.
std::int64_t keys_before(const AttentionVariant& variant);

/// The first position that a query at `position` or any later one sees.
std::int64_t first_needed(const AttentionVariant& variant, std::int64_t position);

/// Blocks that a sequence of `tokens` holds at most between steps, `draft_tokens` of its end not
/// rolled back yet: all, or what its window spans wherever it starts in a block.
std::int64_t held_blocks(const AttentionVariant& variant, std::int64_t tokens,
                         std::int64_t draft_tokens, std::int64_t block_size);

}  // namespace fovea::engine
