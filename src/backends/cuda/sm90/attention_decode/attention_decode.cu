#include "backends/cuda/sm90/attention_decode/attention_decode.h"

#include <algorithm>

#include "backends/cuda/sm90/attention_decode/kernel.cuh"
#include "backends/cuda/sm90/split_kv/plan.cuh"

namespace fovea::cuda {
namespace {

using namespace decode;

constexpr int kSharedBytesOfMultiprocessor = 228 * 1024;
constexpr int kSharedBytesOfSystem = 1024;  ///< In each block.

/// The kernel of a launch.
struct Function {
  void (*kernel)(KernelParams);
  int shared_bytes;
  int dim;
  int blocks_per_multiprocessor;

  /// Per cent of the memory that shared memory and L1 are cut from.
  int carveout() const {
    const int bytes = (shared_bytes + kSharedBytesOfSystem) * blocks_per_multiprocessor;
    return (bytes * 100 + kSharedBytesOfMultiprocessor - 1) / kSharedBytesOfMultiprocessor;
  }
};

template <typename T, int kDim, typename Heads>
Function function() {
  using W = Width<T, kDim, Heads>;
  static_assert((sizeof(SharedMemory<W>) + kSharedBytesOfSystem) * W::kBlocksPerMultiprocessor <=
                kSharedBytesOfMultiprocessor);
  return {decode_kernel<W>, sizeof(SharedMemory<W>), kDim, W::kBlocksPerMultiprocessor};
}

template <typename T>
Function function_of_dense(const DecodeParams& p) {
  const std::int32_t dim = std::max(p.qk_dim, p.v_dim);
  return dim <= 64    ? function<T, 64, DenseHeads>()
         : dim <= 128 ? function<T, 128, DenseHeads>()
                      : function<T, 256, DenseHeads>();
}

template <typename T, typename Heads>
Function function_of_width(const DecodeParams& p) {
  if (p.qk_dim == 64) return function<T, 64, Heads>();
  if (p.qk_dim == 256) return function<T, 256, Heads>();
  return function<T, 128, Heads>();
}

template <typename Heads>
Function function_of_quantized(const DecodeParams& p) {
  return p.type == ElementType::bf16 ? function_of_width<__nv_bfloat16, Heads>(p)
                                     : function_of_width<__half, Heads>(p);
}

Function function_of(const DecodeParams& p) {
  switch (p.format) {
    case CacheFormat::fp8_e4m3:
      return function_of_quantized<Fp8E4m3Heads>(p);
    case CacheFormat::fp8_e5m2:
      return function_of_quantized<Fp8E5m2Heads>(p);
    case CacheFormat::fp8_per_token:
      return function_of_quantized<Fp8PerTokenHeads>(p);
    case CacheFormat::int8_per_token:
      return function_of_quantized<Int8Heads>(p);
    case CacheFormat::int4_per_token:
      return function_of_quantized<Int4Heads>(p);
    default:
      return p.type == ElementType::bf16 ? function_of_dense<__nv_bfloat16>(p)
                                         : function_of_dense<__half>(p);
  }
}

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Where the parts of a workspace lie, in bytes from its start.
struct WorkspaceLayout {
  std::size_t counters, stats, out, bytes;
  std::int32_t num_counters;

  WorkspaceLayout(std::int32_t groups, std::int32_t kv_heads, int dim) {
    num_counters = 2 * groups * kv_heads;
    counters = aligned(sizeof(split_kv::GroupRange) * groups);
    stats = counters + aligned(sizeof(std::uint32_t) * num_counters);
    out = stats + aligned(sizeof(float) * 2 * kRows * num_counters);
    bytes = out + sizeof(float) * kRows * dim * num_counters;
  }
};

/// Of each key head: together as many as there is room for, or one.
cudaError_t groups_of(const Function& f, std::int32_t kv_heads, std::int32_t* groups) {
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *groups = std::max(1, multiprocessors * f.blocks_per_multiprocessor / kv_heads);
  return status;
}

split_kv::ScheduleShape shape_of(const DecodeParams& p, std::int32_t groups) {
  return {.num_groups = groups,
          .heads = p.num_heads / p.num_kv_heads,
          .rows_per_job = kRows,
          .window_left = static_cast<std::int32_t>(p.variant.window_left),
          .attention_chunk = static_cast<std::int32_t>(p.variant.attention_chunk)};
}

bool is_multiple(const void* pointer, std::uintptr_t of) {
  return reinterpret_cast<std::uintptr_t>(pointer) % of == 0;
}

}  // namespace

const char* attention_decode_sm90_declines(const DecodeParams& p) {
  if (p.type == ElementType::f32) return "queries must be bf16 or f16";
  if (std::max(p.qk_dim, p.v_dim) > 256) return "heads must have at most 256 channels";
  const bool dense = p.format == CacheFormat::dense;
  if ((p.qk_dim | p.v_dim) % 8 != 0) return "widths must be multiples of 8";
  if (!dense &&
      (p.qk_dim != p.v_dim || (p.qk_dim != 64 && p.qk_dim != 128 && p.qk_dim != 256))) {
    return "quantised heads must have 64, 128 or 256 channels";
  }
  for (const HeadRows* rows : {&p.k_cache, &p.v_cache}) {
    const std::int64_t strides = rows->head_stride | rows->row_stride | rows->block_stride;
    const std::int64_t bytes = has_token_scales(p.format) ? 8 : 16;
    if (!is_multiple(rows->data, bytes) || strides * (dense ? 2 : 1) % bytes != 0) {
      return "rows must be 16-byte aligned, those with scales 8-byte aligned";
    }
  }
  if (!is_multiple(p.q, 16) || (p.q_row_stride | p.q_head_stride) % 8 != 0) {
    return "query rows must be 16-byte aligned";
  }
  const std::int64_t aligned = p.out_type == ElementType::f32 ? 2 : 8;
  if (!is_multiple(p.out, p.out_type == ElementType::f32 ? 8 : 16) ||
      (p.out_row_stride | p.out_head_stride) % aligned != 0) {
    return "output rows must be 16-byte aligned (8 in f32)";
  }
  if (p.k_cache.block_size > INT32_MAX || p.variant.window_left > INT32_MAX ||
      p.variant.attention_chunk > INT32_MAX) {
    return "block size, window and chunk must be below 2^31";
  }
  return nullptr;
}

cudaError_t attention_decode_sm90_workspace_bytes(const DecodeParams& p, std::size_t* bytes) {
  const Function f = function_of(p);
  std::int32_t groups = 0;
  const cudaError_t status = groups_of(f, p.num_kv_heads, &groups);
  *bytes = WorkspaceLayout(groups, p.num_kv_heads, f.dim).bytes;
  return status;
}

cudaError_t attention_decode_sm90_plan(const DecodeParams& p, void* workspace,
                                       cudaStream_t stream) {
  const Function f = function_of(p);
  std::int32_t groups = 0;
  const cudaError_t status = groups_of(f, p.num_kv_heads, &groups);
  if (status != cudaSuccess) return status;
  const WorkspaceLayout layout(groups, p.num_kv_heads, f.dim);
  auto* base = static_cast<std::byte*>(workspace);
  split_kv::plan_kernel<<<1, split_kv::kPlanThreads, 0, stream>>>(
      shape_of(p, groups), p.num_requests, p.query_start_loc, p.seq_lens,
      reinterpret_cast<split_kv::GroupRange*>(base),
      reinterpret_cast<std::uint32_t*>(base + layout.counters), layout.num_counters);
  return cudaGetLastError();
}

cudaError_t attention_decode_sm90(const DecodeParams& p, void* workspace, cudaStream_t stream) {
  const Function f = function_of(p);
  std::int32_t groups = 0;
  cudaError_t status = groups_of(f, p.num_kv_heads, &groups);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(f.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                f.shared_bytes);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(f.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                f.carveout());
  if (status != cudaSuccess) return status;
  const WorkspaceLayout layout(groups, p.num_kv_heads, f.dim);
  auto* base = static_cast<std::byte*>(workspace);
  KernelParams params{p,
                      shape_of(p, groups),
                      reinterpret_cast<const split_kv::GroupRange*>(base),
                      reinterpret_cast<std::uint32_t*>(base + layout.counters),
                      reinterpret_cast<float*>(base + layout.stats),
                      reinterpret_cast<float4*>(base + layout.out)};
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  config.gridDim = dim3(static_cast<unsigned>(groups * p.num_kv_heads));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(f.shared_bytes);
  config.stream = stream;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, f.kernel, params);
}

}  // namespace fovea::cuda
