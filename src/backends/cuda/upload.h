// Host arrays of a call on their way to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fovea::cuda {

/// Takes words one by one and sends them as parameters of kernels: nothing is allocated, nobody
/// waits, the host's arrays may go away at once, and a captured graph has its own copy.
class Upload {
 public:
  /// `device` holds what will be put.
  Upload(std::int32_t* device, cudaStream_t stream) : to_(device), stream_(stream) {}
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  /// Where the next word goes.
  std::int32_t* next() const { return to_ + count_; }
  void put(std::int32_t word) {
    if (count_ == kWords) send();
    words_[count_++] = word;
  }
  /// Two words; next() must be a multiple of 8 bytes.
  void put(std::uint64_t value) {
    put(static_cast<std::int32_t>(value));
    put(static_cast<std::int32_t>(value >> 32));
  }
  /// Sends what has not been sent. Call it last.
  void send();

 private:
  static constexpr int kWords = 8000;  ///< Parameters of a kernel may take 32764 bytes.

  std::int32_t* to_;
  cudaStream_t stream_;
  int count_ = 0;
  std::int32_t words_[kWords];
};

}  // namespace fovea::cuda
