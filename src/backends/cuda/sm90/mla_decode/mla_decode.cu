#include <algorithm>
#include <numeric>

#include "backends/cuda/sm90/mla_decode/kernel.cuh"
#include "backends/cuda/sm90/mla_decode/mla_decode.h"
#include "backends/cuda/sm90/mla_decode/quantized.h"
#include "backends/cuda/sm90/mla_decode/wide.h"
#include "backends/cuda/sm90/split_kv/plan.cuh"
#include "backends/cuda/sm90/tensor_map.h"

namespace fovea::cuda {
namespace {

using mla::KernelParams;

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Where the parts of a workspace lie, in bytes from its start.
struct WorkspaceLayout {
  std::size_t rendezvous, stats, out, bytes;
  std::int32_t num_partials;

  explicit WorkspaceLayout(const MlaDecodeGeometry& g)
      : num_partials(2 * g.num_groups * g.row_tiles_per_group) {
    rendezvous = aligned(sizeof(mla::GroupRange) * g.num_groups);
    stats = rendezvous + aligned(sizeof(std::uint64_t) * num_partials);
    out = stats + aligned(sizeof(float) * 2 * g.rows * num_partials);
    bytes = out + sizeof(float) * mla::kLatent * g.rows * num_partials;
  }
};

/// The kernel of a launch, as the runtime takes it.
struct Function {
  const void* address;
  std::size_t shared_bytes;
  int threads;
};

Function function_of(const MlaDecodeParams& p, std::int32_t rows) {
  const bool is_bf16 = p.query_type == ElementType::bf16;
  if (p.cache_format != CacheFormat::dense) {
    const mla::QuantizedKernel kernel = mla::quantized_kernel(p.cache_format);
    return {reinterpret_cast<const void*>(kernel.function), kernel.shared_bytes, kernel.threads};
  }
  if (rows == mla::kWideRows) {
    const mla::WideKernel kernel = mla::wide_kernel(p.query_type);
    return {reinterpret_cast<const void*>(kernel.function), kernel.shared_bytes, mla::kWideThreads};
  }
  using mla::mla_decode_kernel;
  const auto kernel = is_bf16 ? (rows == 16 ? mla_decode_kernel<__nv_bfloat16, 16>
                                            : mla_decode_kernel<__nv_bfloat16, 32>)
                              : (rows == 16 ? mla_decode_kernel<__half, 16>
                                            : mla_decode_kernel<__half, 32>);
  const std::size_t bytes =
      rows == 16 ? sizeof(mla::SharedMemory<16>) : sizeof(mla::SharedMemory<32>);
  return {reinterpret_cast<const void*>(kernel), bytes, mla::kThreads};
}
static_assert(sizeof(mla::SharedMemory<16>) <= 227 * 1024);
static_assert(sizeof(mla::SharedMemory<32>) <= 227 * 1024);

/// Keys that one copy brings: they must lie in one block, and boxes must not straddle tiles.
std::int32_t box_rows(const MlaDecodeParams& p) {
  return static_cast<std::int32_t>(std::gcd(p.block_size, std::int64_t{mla::kKeyTile}));
}

/// The cache as [block][row][channel] with boxes of box_rows x 64 channels.
cudaError_t encode_tensor_map(const MlaDecodeParams& p, CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t shape[3] = {mla::kLatent + mla::kRope, static_cast<cuuint64_t>(p.block_size),
                               static_cast<cuuint64_t>(p.num_blocks)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(p.cache_row_stride) * 2,
                                 static_cast<cuuint64_t>(p.cache_block_stride) * 2};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows(p)), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result =
      encode(map,
             p.cache_type == ElementType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             3, const_cast<void*>(p.cache), shape, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// Whether a box of quantised rows is contiguous and 16-byte aligned.
bool rows_come_in_bulk(const MlaDecodeParams& p) {
  const std::int64_t row_bytes = mla::quantized_kernel(p.cache_format).row_bytes;
  const std::int64_t box = box_rows(p);
  return (box == 1 || p.cache_row_stride == row_bytes) && box * row_bytes % 16 == 0 &&
         box * p.cache_row_stride % 16 == 0 && p.cache_block_stride % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(p.cache) % 16 == 0;
}

bool is_multiple(const void* pointer, std::uintptr_t of) {
  return reinterpret_cast<std::uintptr_t>(pointer) % of == 0;
}

}  // namespace

const char* mla_decode_sm90_declines(const MlaDecodeParams& p) {
  if (p.latent_dim != mla::kLatent || p.rope_dim != mla::kRope) {
    return "rows must have 512 latent and 64 rope channels";
  }
  if (p.query_type == ElementType::f32) return "queries must be bf16 or f16";
  const bool dense = p.cache_format == CacheFormat::dense;
  if (dense && p.cache_type != p.query_type) return "cache and queries must have one dtype";
  if (p.cache_format == CacheFormat::fp8_ds_mla && p.query_type != ElementType::bf16) {
    return "queries over fp8_ds_mla must be bf16, as its rope channels are";
  }
  if (p.num_heads < 1 || p.num_heads > 128) return "heads must be 1 to 128";
  const std::int64_t query_strides =
      p.q_latent_token_stride | p.q_latent_head_stride | p.q_pe_token_stride | p.q_pe_head_stride;
  if (!is_multiple(p.q_latent, 16) || !is_multiple(p.q_pe, 16) || query_strides % 8 != 0) {
    return "query rows must be 16-byte aligned";
  }
  if (!dense &&
      (!is_multiple(p.cache, 8) || (p.cache_row_stride | p.cache_block_stride) % 8 != 0)) {
    return "quantised cache rows must be 8-byte aligned";
  }
  if (dense &&
      (!is_multiple(p.cache, 16) || (p.cache_row_stride | p.cache_block_stride) % 8 != 0)) {
    return "cache rows must be 16-byte aligned";
  }
  constexpr std::int64_t kMaxStride = std::int64_t{1} << 39;  // 40 bits of bytes.
  if (p.cache_row_stride < 0 || p.cache_block_stride < 0 || p.cache_row_stride >= kMaxStride ||
      p.cache_block_stride >= kMaxStride || p.num_blocks > INT32_MAX || p.block_size > INT32_MAX) {
    return "the cache is outside the copy engine's limits";
  }
  if (p.out_type != ElementType::f32 &&
      (!is_multiple(p.out, 4) || (p.out_token_stride | p.out_head_stride) % 2 != 0)) {
    return "16-bit output rows must be 4-byte aligned";
  }
  return nullptr;
}

cudaError_t mla_decode_sm90_geometry(const MlaDecodeParams& p, MlaDecodeGeometry* geometry) {
  MlaDecodeGeometry g;
  const std::int64_t rows = std::int64_t{p.num_heads} * std::max(p.max_query_len, 1);
  const bool dense = p.cache_format == CacheFormat::dense;
  g.rows = rows <= 16 || !dense ? 16 : rows <= 32 ? 32 : 64;
  g.row_tiles_per_group = rows > g.rows ? 2 : 1;

  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;

  // One group per multiprocessor or two. Jobs of one length are best cut alike; their merges take
  // results in eights.
  const std::int64_t rows_per_job = std::int64_t{g.rows} * g.row_tiles_per_group;
  const std::int64_t jobs_per_request = (rows + rows_per_job - 1) / rows_per_job;
  const std::int64_t jobs = std::max<std::int64_t>(p.num_requests, 1) * jobs_per_request;
  g.num_groups = multiprocessors / g.row_tiles_per_group;
  if (g.num_groups > jobs) {
    const std::int64_t pieces = g.num_groups / jobs;
    g.num_groups = static_cast<std::int32_t>(jobs * (pieces > 8 ? pieces / 8 * 8 : pieces));
  }
  *geometry = g;
  return cudaSuccess;
}

std::size_t mla_decode_sm90_workspace_bytes(const MlaDecodeGeometry& geometry) {
  return WorkspaceLayout(geometry).bytes;
}

cudaError_t mla_decode_sm90_plan(const MlaDecodeParams& p, const MlaDecodeGeometry& g,
                                 void* workspace, cudaStream_t stream) {
  const WorkspaceLayout layout(g);
  auto* base = static_cast<std::byte*>(workspace);
  split_kv::plan_kernel<<<1, split_kv::kPlanThreads, 0, stream>>>(
      mla::schedule_shape(p, g), p.num_requests, p.query_start_loc, p.seq_lens,
      reinterpret_cast<mla::GroupRange*>(base),
      reinterpret_cast<std::uint32_t*>(base + layout.rendezvous), 2 * layout.num_partials);
  return cudaGetLastError();
}

cudaError_t mla_decode_sm90(const MlaDecodeParams& p, const MlaDecodeGeometry& g, void* workspace,
                            cudaStream_t stream) {
  const bool quantized = p.cache_format != CacheFormat::dense;
  const Function function = function_of(p, g.rows);
  cudaError_t status =
      cudaFuncSetAttribute(function.address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(function.shared_bytes));
  CUtensorMap map{};
  if (status == cudaSuccess && !quantized) status = encode_tensor_map(p, &map);
  if (status != cudaSuccess) return status;

  const WorkspaceLayout layout(g);
  auto* base = static_cast<std::byte*>(workspace);
  KernelParams params{p,
                      g,
                      mla::schedule_shape(p, g),
                      Divisor(p.num_heads),
                      Divisor(std::max<std::int64_t>(p.block_size, 1)),
                      box_rows(p),
                      quantized && rows_come_in_bulk(p),
                      reinterpret_cast<const mla::GroupRange*>(base),
                      reinterpret_cast<std::uint64_t*>(base + layout.rendezvous),
                      reinterpret_cast<float4*>(base + layout.stats),
                      reinterpret_cast<float4*>(base + layout.out)};
  void* arguments[] = {&params, &map};
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  // Row tiles of a group read the same keys: a cluster begins them together.
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(g.row_tiles_per_group);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(g.num_groups * g.row_tiles_per_group));
  config.blockDim = dim3(static_cast<unsigned>(function.threads));
  config.dynamicSmemBytes = function.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelExC(&config, function.address, arguments);
}

}  // namespace fovea::cuda
