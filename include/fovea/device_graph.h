// Work of a GPU, queued once and launched as often as wanted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "fovea/op_context.h"

namespace fovea {

/// A CUDA graph of ops, layers and products. It holds addresses: operands, scratch and weights must
/// stay where they are. What the host planned stays as it was; decodes whose schedule has
/// device_seq_lens see the lengths and blocks that the device has when it is launched.
class DeviceGraph {
 public:
  /// Calls `queue`, which computes on `ctx`: its work becomes the graph's and is not done. Borrows
  /// `ctx`. Throws Error(unsupported) unless ctx computes on a GPU, on another stream than the
  /// default one (RuntimeOptions::own_cuda_stream).
  DeviceGraph(const OpContext& ctx, const std::function<void()>& queue);
  ~DeviceGraph();
  DeviceGraph(DeviceGraph&&) noexcept;
  DeviceGraph& operator=(DeviceGraph&&) noexcept;

  std::int64_t num_nodes() const;
  /// Queued on the stream of ctx.
  void launch() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
