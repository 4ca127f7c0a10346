#include "backends/cuda/sm90/mla_decode/wide.h"

#include "backends/cuda/sm90/mla_decode/wide.cuh"

namespace fovea::cuda::mla {

static_assert(sizeof(WideMemory) <= 227 * 1024);

WideKernel wide_kernel(ElementType type) {
  const auto kernel =
      type == ElementType::bf16 ? wide_decode_kernel<__nv_bfloat16> : wide_decode_kernel<__half>;
  return {kernel, sizeof(WideMemory)};
}

}  // namespace fovea::cuda::mla
