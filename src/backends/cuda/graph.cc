// Streams, and graphs of what is queued on them.
#include "backends/cuda/graph.h"

#include "backends/cuda/backend.h"
#include "backends/cuda/launch.h"

namespace fovea {

using cuda::check;

std::shared_ptr<void> make_cuda_stream(int index) {
  const cuda::CurrentDevice current({Device::Type::cuda, index});
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return {stream, [](void* made) { cudaStreamDestroy(static_cast<cudaStream_t>(made)); }};
}

namespace cuda {

KeptWork capture(const OpContext& ctx, const std::function<void()>& queue) {
  const CurrentDevice current(ctx.memory.device);
  const cudaStream_t stream = stream_of(ctx);
  FOVEA_CHECK(stream != nullptr, unsupported,
              "ctx has the default stream, but work of a graph must be queued on another");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin of a capture");
  cudaGraph_t captured = nullptr;
  try {
    queue();
  } catch (...) {
    cudaStreamEndCapture(stream, &captured);
    if (captured) cudaGraphDestroy(captured);
    throw;
  }
  check(cudaStreamEndCapture(stream, &captured), "end of a capture");
  const std::shared_ptr<void> graph(captured, [](void* made) {
    cudaGraphDestroy(static_cast<cudaGraph_t>(made));
  });
  std::size_t num_nodes = 0;
  check(cudaGraphGetNodes(captured, nullptr, &num_nodes), "cudaGraphGetNodes");
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, captured, 0), "cudaGraphInstantiate");
  return {{executable,
           [](void* made) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(made)); }},
          static_cast<std::int64_t>(num_nodes)};
}

void launch_kept(const OpContext& ctx, const KeptWork& work) {
  const CurrentDevice current(ctx.memory.device);
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(work.executable.get()),
                        stream_of(ctx)),
        "cudaGraphLaunch");
}

}  // namespace cuda
}  // namespace fovea
