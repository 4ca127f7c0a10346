#include <algorithm>

#include "backends/cuda/launch.h"
#include "backends/cuda/upload.h"

namespace fovea::cuda {
namespace {

template <int kMax>
struct Words {
  int count;
  std::int32_t words[kMax];
};

template <int kMax>
__global__ void write_words(const __grid_constant__ Words<kMax> from, std::int32_t* to) {
  for (int i = threadIdx.x; i < from.count; i += blockDim.x) to[i] = from.words[i];
}

template <int kMax>
void launch(const std::int32_t* words, int count, std::int32_t* to, cudaStream_t stream) {
  Words<kMax> message;
  message.count = count;
  std::copy_n(words, count, message.words);
  write_words<<<1, 256, 0, stream>>>(message, to);
  check(cudaGetLastError(), "upload of a plan");
}

}  // namespace

void Upload::send() {
  // A launch costs by the size of its parameters.
  constexpr int kFew = 1000;
  if (count_ > kFew) {
    launch<kWords>(words_, count_, to_, stream_);
  } else if (count_ > 0) {
    launch<kFew>(words_, count_, to_, stream_);
  }
  to_ += count_;
  count_ = 0;
}

}  // namespace fovea::cuda
