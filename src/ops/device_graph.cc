#include "fovea/device_graph.h"

#include "core/check.h"
#include "core/kernel_time.h"
#include "ops/backend.h"

namespace fovea {

struct DeviceGraph::State {
  const OpContext& ctx;
  KeptWork work;
};

DeviceGraph::DeviceGraph(const OpContext& ctx, const std::function<void()>& queue) {
  FOVEA_CHECK(!ctx.backends.empty() && ctx.backends.front()->capture != nullptr, unsupported,
              "ctx computes on {}, but a graph is of a GPU's work", to_string(ctx.memory.device));
  state_.reset(new State{ctx, ctx.backends.front()->capture(ctx, queue)});
}
DeviceGraph::~DeviceGraph() = default;
DeviceGraph::DeviceGraph(DeviceGraph&&) noexcept = default;
DeviceGraph& DeviceGraph::operator=(DeviceGraph&&) noexcept = default;

std::int64_t DeviceGraph::num_nodes() const { return state_->work.num_nodes; }
void DeviceGraph::launch() const {
  const KernelTimer timer;
  state_->ctx.backends.front()->launch(state_->ctx, state_->work);
}

}  // namespace fovea
