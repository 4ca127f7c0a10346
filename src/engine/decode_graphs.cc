#include "engine/decode_graphs.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace fovea::engine {

bool DecodeGraphs::available() const {
  return ctx_.memory.device.type == Device::Type::cuda && ctx_.stream != nullptr;
}

DecodeStep& DecodeGraphs::step_for(std::int64_t requests, std::int64_t max_rows,
                                   const MakeStep& make) {
  const auto power = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(requests)));
  const std::int64_t rows = std::min(power, max_rows);
  const auto found = steps_.find(rows);
  return found != steps_.end() ? found->second : steps_.emplace(rows, make(rows)).first->second;
}

void DecodeGraphs::run(DecodeStep& step, std::int64_t layer,
                       const std::function<void()>& queue) const {
  if (layer < std::ssize(step.graphs)) return step.graphs[static_cast<std::size_t>(layer)].launch();
  queue();  // Also loads what a capture must find loaded.
  step.graphs.emplace_back(ctx_, queue);
}

}  // namespace fovea::engine
