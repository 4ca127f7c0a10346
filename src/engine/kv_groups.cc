#include "engine/kv_groups.h"

#include <algorithm>

#include "variants/visibility.h"

namespace fovea::engine {

std::vector<KvGroup> kv_groups(const Model& model) {
  const std::vector<KvGroupConfig>& configs = model.config().groups;
  std::vector<KvGroup> groups;
  for (std::size_t g = 0; g < configs.size(); ++g) {
    KvGroup group{static_cast<std::int32_t>(g), configs[g].variant, {}};
    for (std::int64_t layer = 0; layer < model.num_layers(); ++layer) {
      if (model.layer(layer).kv_group == group.config_index) group.layers.push_back(layer);
    }
    if (!group.layers.empty()) groups.push_back(std::move(group));
  }
  return groups;
}

std::int64_t max_position(const Model& model) {
  std::int64_t positions = model.config().max_position;
  for (const KvGroup& group : kv_groups(model)) {
    const RopeConfig& rope =
        model.config().groups[static_cast<std::size_t>(group.config_index)].rope;
    if (rope.dim > 0) positions = std::min(positions, rope.max_position);
  }
  return positions;
}

std::int64_t keys_before(const AttentionVariant& variant) {
  const std::int64_t of_chunk = variant.attention_chunk - 1;
  if (variant.window_left < 0) return of_chunk;
  return of_chunk < 0 ? variant.window_left : std::min(variant.window_left, of_chunk);
}

std::int64_t first_needed(const AttentionVariant& variant, std::int64_t position) {
  return std::max<std::int64_t>(0, first_visible_position(variant, position));
}

std::int64_t held_blocks(const AttentionVariant& variant, std::int64_t tokens,
                         std::int64_t draft_tokens, std::int64_t block_size) {
  const std::int64_t all = (tokens + block_size - 1) / block_size;
  const std::int64_t before = keys_before(variant);
  if (before < 0) return all;
  // n tokens that start anywhere touch ceil((n - 1) / block_size) + 1 blocks at most.
  const std::int64_t spanned = (before + draft_tokens + block_size - 1) / block_size + 1;
  return std::min(all, spanned);
}

}  // namespace fovea::engine
