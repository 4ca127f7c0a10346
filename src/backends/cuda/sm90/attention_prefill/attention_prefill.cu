#include "backends/cuda/sm90/attention_prefill/attention_prefill.h"

#include <algorithm>
#include <numeric>

#include "backends/cuda/sm90/attention_prefill/kernel.cuh"
#include "backends/cuda/sm90/tensor_map.h"

namespace fovea::cuda {
namespace {

using namespace prefill;

static_assert(kQueryTile == kPrefillQueryTile);

using Kernel = void (*)(PrefillParams, TensorMaps);

/// The kernel of a launch.
struct Function {
  Kernel kernel;
  int shared_bytes;
  int key_tile;
};

template <typename W>
Function function() {
  static_assert(sizeof(SharedMemory<W>) <= 227 * 1024);
  return {prefill_kernel<W>, sizeof(SharedMemory<W>), W::kKeys};
}

/// Classes of widths, in order of preference.
struct WidthClass {
  int qk, v;
};
constexpr WidthClass kClasses[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

/// Channels of a key in shared memory: k and k_pe each begin a chunk.
std::int64_t padded_key(const PrefillParams& p) {
  const auto padded = [](std::int64_t channels) { return (channels + 63) / 64 * 64; };
  return padded(p.qk_dim - p.pe_dim) + padded(p.pe_dim);
}

/// Index into kClasses; -1: none.
int class_of(const PrefillParams& p) {
  for (int i = 0; i < 4; ++i) {
    if (padded_key(p) <= kClasses[i].qk && p.v_dim <= kClasses[i].v) return i;
  }
  return -1;
}

template <typename T>
Function function_of(int width_class) {
  switch (width_class) {
    case 0:
      return function<Widths<T, 64, 64>>();
    case 1:
      return function<Widths<T, 128, 128>>();
    case 2:
      return function<Widths<T, 192, 128>>();
    default:
      return function<Widths<T, 256, 256>>();
  }
}

bool is_multiple(const void* pointer, std::uintptr_t of) {
  return reinterpret_cast<std::uintptr_t>(pointer) % of == 0;
}

/// Whether the copy engine takes rows of 16-bit elements. Strides over one element have no say.
bool fits_copy_engine(const HeadRows& r) {
  constexpr std::int64_t kMaxStride = std::int64_t{1} << 39;
  const auto fits = [](std::int64_t extent, std::int64_t stride) {
    return extent <= 1 || (stride > 0 && stride < kMaxStride && stride % 8 == 0);
  };
  return is_multiple(r.data, 16) && fits(r.heads, r.head_stride) &&
         fits(r.block_size, r.row_stride) && fits(r.num_blocks, r.block_stride) &&
         r.block_size <= INT32_MAX && r.num_blocks <= INT32_MAX;
}

/// Boxes of 64 channels of one head x `rows` rows of one block. What is absent is never read.
cudaError_t encode(const PrefillParams& p, const HeadRows& r, std::int64_t rows,
                   CUtensorMap* map) {
  if (r.data == nullptr || r.block_size == 0 || r.num_blocks == 0) return cudaSuccess;
  const auto encode_tiled = tensor_map_encoder();
  if (encode_tiled == nullptr) return cudaErrorNotSupported;
  // Strides over one element are free, and may not fit: as if contiguous, to 16 bytes.
  const std::int64_t head = r.heads > 1 ? r.head_stride : (r.channels + 7) / 8 * 8;
  const std::int64_t row = r.block_size > 1 ? r.row_stride : r.heads * head;
  const std::int64_t block = r.num_blocks > 1 ? r.block_stride : r.block_size * row;
  const cuuint64_t shape[4] = {
      static_cast<cuuint64_t>(r.channels), static_cast<cuuint64_t>(r.heads),
      static_cast<cuuint64_t>(r.block_size), static_cast<cuuint64_t>(r.num_blocks)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(head) * 2,
                                 static_cast<cuuint64_t>(row) * 2,
                                 static_cast<cuuint64_t>(block) * 2};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(rows), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult result = encode_tiled(
      map,
      p.type == ElementType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, const_cast<void*>(r.data), shape, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t encode_all(const PrefillParams& p, std::int64_t key_tile, TensorMaps* maps) {
  const std::int64_t box_rows =
      p.k_cache.data ? std::gcd(p.k_cache.block_size, key_tile) : std::int64_t{1};
  const struct {
    const HeadRows& rows;
    std::int64_t box_rows;
    CUtensorMap* map;
  } all[] = {{p.q, kQueryTile, &maps->q},       {p.k, key_tile, &maps->k},
             {p.k_pe, key_tile, &maps->k_pe},   {p.v, key_tile, &maps->v},
             {p.k_cache, box_rows, &maps->k_cache}, {p.v_cache, box_rows, &maps->v_cache}};
  for (const auto& [rows, box, map] : all) {
    const cudaError_t status = encode(p, rows, box, map);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace

const char* attention_prefill_sm90_declines(const PrefillParams& p) {
  if (p.type == ElementType::f32) return "queries must be bf16 or f16";
  if (class_of(p) < 0) {
    return "values and keys (k, k_pe each up to a multiple of 64) must have at most 256 channels";
  }
  if ((p.qk_dim | p.pe_dim | p.v_dim) % 8 != 0) return "widths must be multiples of 8";
  for (const HeadRows* rows : {&p.q, &p.k, &p.k_pe, &p.v, &p.k_cache, &p.v_cache}) {
    if (!fits_copy_engine(*rows)) return "rows must be 16-byte aligned";
  }
  const std::int64_t aligned = p.out_type == ElementType::f32 ? 2 : 8;
  if (!is_multiple(p.out, p.out_type == ElementType::f32 ? 8 : 16) ||
      (p.out_row_stride | p.out_head_stride) % aligned != 0) {
    return "output rows must be 16-byte aligned (8 in f32)";
  }
  return nullptr;
}

std::int32_t prefill_heads_at_once(const PrefillParams& p, std::int64_t max_keys) {
  constexpr std::int64_t kCached = std::int64_t{32} << 20;  // Of 50 MB of L2.
  const std::int64_t bytes_of_head = std::max<std::int64_t>(max_keys * (p.qk_dim + p.v_dim) * 2, 1);
  std::int64_t kv_heads =
      std::clamp<std::int64_t>(kCached / bytes_of_head, 1, p.num_kv_heads);
  while (p.num_kv_heads % kv_heads != 0) --kv_heads;
  return static_cast<std::int32_t>(kv_heads * (p.num_heads / p.num_kv_heads));
}

cudaError_t attention_prefill_sm90(const PrefillParams& p, cudaStream_t stream) {
  const int width_class = class_of(p);
  const Function f = p.type == ElementType::bf16 ? function_of<__nv_bfloat16>(width_class)
                                                 : function_of<__half>(width_class);
  TensorMaps maps{};
  cudaError_t status = encode_all(p, f.key_tile, &maps);
  if (status != cudaSuccess) return status;
  int device = 0, multiprocessors = 0;
  status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(f.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                f.shared_bytes);
  if (status != cudaSuccess) return status;
  const int blocks = std::min(multiprocessors, p.num_tiles * p.num_heads);
  f.kernel<<<blocks, kThreads, f.shared_bytes, stream>>>(p, maps);
  return cudaGetLastError();
}

}  // namespace fovea::cuda
